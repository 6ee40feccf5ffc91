// Marks the few definitions that libraries of operators take from the library of kernels.
#pragma once

// A definition that other libraries use; all others of the kernels are hidden.
#define IKATTN_EXPORTED __attribute__((visibility("default")))
