# Finds LibTorch, and defines a target of its headers and CPU libraries.
#
# Used by the build and, installed, by ikattnConfig.cmake. find_package(Torch) is not: for a torch with
# CUDA (the usual one on Linux) it stops where no CUDA toolkit is installed, although nothing here
# needs one. A program may call find_package(Torch) beside find_package(ikattn).

# Sets in the caller: IKATTN_TORCH_PREFIX, IKATTN_TORCH_VERSION (major.minor.patch) and
# IKATTN_TORCH_SERIES (major.minor).
#   HINTS  more directories that may hold torch, tried last
function(ikattn_find_torch)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "" "HINTS")
  file(TO_CMAKE_PATH "$ENV{CMAKE_PREFIX_PATH}" environment_prefixes)
  find_path(
    config_dir TorchConfig.cmake
    HINTS ${Torch_DIR} $ENV{Torch_DIR} ${CMAKE_PREFIX_PATH} ${environment_prefixes} ${arg_HINTS}
    PATH_SUFFIXES Torch share/cmake/Torch
    NO_DEFAULT_PATH NO_CACHE)
  if(NOT config_dir)
    message(
      FATAL_ERROR
        "ikattn needs LibTorch and did not find TorchConfig.cmake: pass the directory that contains it, "
        "-DTorch_DIR=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')/Torch")
  endif()
  cmake_path(SET prefix NORMALIZE "${config_dir}/../../..")
  string(REGEX REPLACE "/$" "" prefix "${prefix}")

  foreach(header include/torch/headeronly/version.h include/torch/csrc/api/include/torch/version.h)
    if(EXISTS "${prefix}/${header}")
      file(STRINGS "${prefix}/${header}" numbers REGEX "^#define TORCH_VERSION_(MAJOR|MINOR|PATCH) ")
      if(numbers)
        break()
      endif()
    endif()
  endforeach()
  string(REGEX REPLACE "[^;]* ([0-9]+)" "\\1" numbers "${numbers}")
  string(REPLACE ";" "." version "${numbers}")

  string(REGEX MATCH "^[0-9]+\\.[0-9]+" series "${version}")
  set(IKATTN_TORCH_PREFIX "${prefix}" PARENT_SCOPE)
  set(IKATTN_TORCH_VERSION "${version}" PARENT_SCOPE)
  set(IKATTN_TORCH_SERIES "${series}" PARENT_SCOPE)
endfunction()

# Sets `result` in the caller to the major version of CUDA that the torch in `prefix` was built for, such as
# 13; empty: without CUDA.
function(ikattn_cuda_of_torch result prefix)
  set(${result} "" PARENT_SCOPE)
  set(library "${prefix}/lib/libc10_cuda.so")
  if(EXISTS "${library}")
    file(STRINGS "${library}" runtime LIMIT_COUNT 1 REGEX "libcudart\\.so\\.[0-9]+")
    if(runtime MATCHES "libcudart\\.so\\.([0-9]+)")
      set(${result} ${CMAKE_MATCH_1} PARENT_SCOPE)
    endif()
  endif()
endfunction()

# Defines a target of the libraries of the torch in `prefix`, unless there is one.
function(ikattn_define_torch target prefix)
  if(TARGET ${target})
    return()
  endif()
  add_library(${target} INTERFACE IMPORTED GLOBAL)
  target_include_directories(
    ${target} INTERFACE "${prefix}/include" "${prefix}/include/torch/csrc/api/include")
  target_link_libraries(
    ${target} INTERFACE "${prefix}/lib/libtorch.so" "${prefix}/lib/libtorch_cpu.so"
                        "${prefix}/lib/libc10.so")
  # Torch's libraries may need CUDA's, which are found when the program runs and not by the linker.
  target_link_options(${target} INTERFACE -Wl,--allow-shlib-undefined)
endfunction()
