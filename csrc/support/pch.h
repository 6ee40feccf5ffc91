// Precompiled for every file of the library that includes torch.
#pragma once

#include "support/portable.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>
