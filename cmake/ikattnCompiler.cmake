# Stops with one sentence when the compiler lacks what the sources need: C++20, the vector extensions of
# GCC and Clang with __builtin_shufflevector, and _Float16.
set(compiler "${CMAKE_CXX_COMPILER_ID} ${CMAKE_CXX_COMPILER_VERSION}")
if(NOT (CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 12)
   AND NOT (CMAKE_CXX_COMPILER_ID STREQUAL "Clang" AND CMAKE_CXX_COMPILER_VERSION
                                                       VERSION_GREATER_EQUAL 16))
  message(FATAL_ERROR "ikattn needs GCC >= 12 or Clang >= 16, got ${compiler}: remove the build "
                      "directory and name another compiler, for example "
                      "CXX=g++-12 pip install --no-build-isolation .")
endif()
