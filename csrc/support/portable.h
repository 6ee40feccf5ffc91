// Binds the libraries to the symbols of old systems: glibc 2.28 and GCC 8's libstdc++.
//
// Every file of the libraries includes this first, so that a wheel that is built on a new system
// loads on old ones. exp, log and pow of glibc 2.29 differ from the older ones in how they report
// errors alone, which nothing here reads.
#pragma once

#include <cstdlib>  // __GLIBC__

#if defined(__GLIBC__) && defined(__x86_64__) && !defined(__CUDA_ARCH__)
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");

// The flag of glibc 2.32 by which std::shared_ptr saves atomic operations: 0, there may be threads.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}
#endif
