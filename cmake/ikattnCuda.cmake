# Whether the CUDA kernels are built, and how.
include("${CMAKE_CURRENT_LIST_DIR}/ikattnTorch.cmake")

# Sets IKATTN_CUDA in the caller, IKATTN_NO_CUDA_REASON where it is off, and `decision` to the words that
# say what was decided and why.
function(ikattn_decide_cuda decision)
  ikattn_why_no_cuda()
  if(reason)
    if(WITH_CUDA AND NOT WITH_CUDA STREQUAL "AUTO")
      message(FATAL_ERROR "WITH_CUDA=${WITH_CUDA}, but ${reason}. "
                          "Unset WITH_CUDA or set it to 0 to build the CPU library.")
    endif()
    set(IKATTN_CUDA OFF PARENT_SCOPE)
    set(IKATTN_NO_CUDA_REASON "${reason}" PARENT_SCOPE)
    set(${decision} "CPU only (${reason})" PARENT_SCOPE)
    return()
  endif()
  ikattn_cuda_architectures()
  set(IKATTN_CUDA ON PARENT_SCOPE)
  # The reason that operators without CUDA give, where there are others with it.
  set(IKATTN_NO_CUDA_REASON "torch was not of the CUDA that they need" PARENT_SCOPE)
  set(CMAKE_CUDA_ARCHITECTURES "${CMAKE_CUDA_ARCHITECTURES}" PARENT_SCOPE)
  string(JOIN ", " architectures ${CMAKE_CUDA_ARCHITECTURES})
  set(${decision} "CUDA for ${architectures} (${architectures_reason})" PARENT_SCOPE)
endfunction()

# Sets `reason` in the caller; empty: nothing is in the way of CUDA kernels.
function(ikattn_why_no_cuda)
  set(oldest 12.5)  # whose runtime has cudaGetDriverEntryPointByVersion
  set(reason "" PARENT_SCOPE)
  if(NOT EXISTS "${IKATTN_TORCH_PREFIX}/lib/libc10_cuda.so")
    set(reason "this torch has no CUDA" PARENT_SCOPE)
    return()
  endif()
  if(NOT WITH_CUDA)
    set(reason "WITH_CUDA=${WITH_CUDA}" PARENT_SCOPE)
    return()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(reason "this torch has CUDA, but no nvcc was found: put it on PATH or set CUDACXX"
        PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --version OUTPUT_VARIABLE said ERROR_QUIET)
  if(NOT said MATCHES "release (([0-9]+)\\.[0-9]+)")
    return()
  endif()
  set(version ${CMAKE_MATCH_1})
  set(major ${CMAKE_MATCH_2})
  if(version VERSION_LESS oldest)
    set(reason "${CMAKE_CUDA_COMPILER} is of CUDA ${version}, and ${oldest} is needed" PARENT_SCOPE)
    return()
  endif()
  # Kernels register with the runtime that torch brings: a second one would know nothing of them.
  ikattn_cuda_of_torch(cuda "${IKATTN_TORCH_PREFIX}")
  if(cuda AND NOT cuda EQUAL major)
    set(reason "this torch is of CUDA ${cuda}, but ${CMAKE_CUDA_COMPILER} of ${version}" PARENT_SCOPE)
  endif()
endfunction()

# CMAKE_CUDA_ARCHITECTURES: what the user says, else the GPU that is here, else the usual ones.
function(ikattn_cuda_architectures)
  if(CMAKE_CUDA_ARCHITECTURES AND "$ENV{CUDAARCHS}$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    # given, or decided when this directory was configured first
    set(architectures_reason "CMAKE_CUDA_ARCHITECTURES" PARENT_SCOPE)
    return()
  endif()
  if(NOT "$ENV{CUDAARCHS}" STREQUAL "")
    set(architectures $ENV{CUDAARCHS})
    set(architectures_reason "CUDAARCHS" PARENT_SCOPE)
  elseif(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    # "8.0;9.0a+PTX" or with spaces
    string(REGEX REPLACE "[ ,]+" ";" listed "$ENV{TORCH_CUDA_ARCH_LIST}")
    foreach(arch IN LISTS listed)
      if(NOT arch MATCHES "^[0-9]+\\.[0-9]+[af]?(\\+PTX)?$")
        message(FATAL_ERROR "ikattn: TORCH_CUDA_ARCH_LIST must list compute capabilities such as 9.0 or "
                            "12.0+PTX, got ${arch}")
      endif()
      string(REGEX REPLACE "\\.|\\+PTX" "" number "${arch}")
      if(arch MATCHES "\\+PTX")
        list(APPEND architectures ${number})
      else()
        list(APPEND architectures ${number}-real)
      endif()
    endforeach()
    set(architectures_reason "TORCH_CUDA_ARCH_LIST" PARENT_SCOPE)
  else()
    execute_process(
      COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE found RESULT_VARIABLE failed ERROR_QUIET)
    # What this nvcc has code for, oldest first.
    execute_process(COMMAND "${CMAKE_CUDA_COMPILER}" --list-gpu-arch OUTPUT_VARIABLE known ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+" known "${known}")
    list(SORT known COMPARE NATURAL)
    if(NOT failed AND found MATCHES "[0-9]+\\.[0-9]+")
      string(REGEX REPLACE "[\r\n]+" ";" found "${found}")
      foreach(capability IN LISTS found)
        string(REPLACE "." "" number "${capability}")
        if(number IN_LIST known AND number GREATER_EQUAL 80)
          list(APPEND architectures ${number}-real)
        elseif(known AND number GREATER_EQUAL 80)
          list(GET known -1 newest)  # its PTX serves newer ones
          list(APPEND architectures ${newest})
        endif()
      endforeach()
    endif()
    if(architectures)
      list(REMOVE_DUPLICATES architectures)
      if("${newest}" IN_LIST architectures)
        list(REMOVE_ITEM architectures ${newest}-real)  # it has that, too
      endif()
      set(architectures_reason "the GPU that is here" PARENT_SCOPE)
    else()
      # PTX of the last two serves what has no code of its own.
      set(architectures 80-real 86-real 89-real)
      foreach(number 100 120)
        if(NOT known OR number IN_LIST known)
          list(APPEND with_ptx ${number})
        endif()
      endforeach()
      if(with_ptx)
        list(APPEND architectures 90-real ${with_ptx})
      else()
        list(APPEND architectures 90)
      endif()
      set(architectures_reason "no GPU here of 8.0 or later: the usual ones" PARENT_SCOPE)
    endif()
  endif()
  foreach(architecture IN LISTS architectures)
    string(REGEX MATCH "^[0-9]+" number "${architecture}")
    if(NOT number)
      message(FATAL_ERROR "ikattn: architectures must be numbers such as 90 or 90-real, got "
                          "${architecture}: change CUDAARCHS, or leave it out for "
                          "the GPU that is here")
    endif()
    if(number LESS 80)
      message(FATAL_ERROR "ikattn: kernels for ${architecture} were asked for, but they need compute "
                          "capability 8.0 or later: change CUDAARCHS or TORCH_CUDA_ARCH_LIST, or "
                          "build with WITH_CUDA=0")
    endif()
  endforeach()
  set(CMAKE_CUDA_ARCHITECTURES ${architectures} PARENT_SCOPE)
endfunction()

# Kernels for the library, for some architectures. They include no torch header.
function(ikattn_add_cuda_objects target architectures)
  add_library(${target} OBJECT ${ARGN})
  target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/csrc
                                               ${PROJECT_SOURCE_DIR}/csrc/include)
  set(compressed -Xfatbin=-compress-all)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 12.8)
    list(APPEND compressed -compress-mode=size)
  endif()
  target_compile_options(
    ${target} PRIVATE -O3 ${compressed} $<$<CONFIG:Debug>:-lineinfo> -include support/portable.h)
  target_compile_definitions(${target} PRIVATE IKATTN_HAVE_WARPGROUPS=${IKATTN_WARPGROUPS})
  # Torch's own copy of the runtime is the one in the process; kernels register with that.
  set_target_properties(
    ${target}
    PROPERTIES POSITION_INDEPENDENT_CODE ON
               CUDA_VISIBILITY_PRESET hidden
               CUDA_RUNTIME_LIBRARY Shared
               CUDA_ARCHITECTURES "${architectures}")
  target_sources(ikattn_cuda_kernels PRIVATE $<TARGET_OBJECTS:${target}>)
endfunction()

# ikattn_add_cuda(sources... WARPGROUPS sources...): the library ikattn_cuda_kernels; kernels of warpgroups
# for Hopper alone (sm_90a), if it is one of CMAKE_CUDA_ARCHITECTURES.
macro(ikattn_add_cuda)
  cmake_parse_arguments(arg "" "" "WARPGROUPS" ${ARGN})
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.25.2 does not know that nvcc has it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit REQUIRED)
  add_library(ikattn_cuda_kernels SHARED)
  # The build ID names the library in the proofs of a machine (families.cu).
  target_link_options(ikattn_cuda_kernels PRIVATE -Wl,--build-id=sha1)
  target_link_libraries(ikattn_cuda_kernels PRIVATE CUDA::cudart)
  set_target_properties(ikattn_cuda_kernels PROPERTIES CUDA_RUNTIME_LIBRARY Shared)
  set(IKATTN_WARPGROUPS 0)
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "(^|;)90")
    set(IKATTN_WARPGROUPS 1)
    ikattn_add_cuda_objects(ikattn_cuda_warpgroups 90a-real ${arg_WARPGROUPS})
  else()
    list(APPEND arg_UNPARSED_ARGUMENTS ${arg_WARPGROUPS})
  endif()
  ikattn_add_cuda_objects(ikattn_cuda_objects "${CMAKE_CUDA_ARCHITECTURES}" ${arg_UNPARSED_ARGUMENTS})
endmacro()

# Lets operators call the kernels, through the torch in `prefix`.
function(ikattn_use_cuda target prefix)
  string(JOIN " " architectures ${CMAKE_CUDA_ARCHITECTURES})
  target_compile_definitions(
    ${target} PRIVATE IKATTN_HAVE_CUDA=1 IKATTN_CUDA_ARCHITECTURES="${architectures}"
                      IKATTN_HAVE_WARPGROUPS=${IKATTN_WARPGROUPS})
  target_include_directories(${target} PRIVATE ${CUDAToolkit_INCLUDE_DIRS})
  target_link_libraries(
    ${target} PRIVATE $<TARGET_FILE:ikattn_cuda_kernels> CUDA::cudart "${prefix}/lib/libc10_cuda.so"
                      "${prefix}/lib/libtorch_cuda.so")
  add_dependencies(${target} ikattn_cuda_kernels)
endfunction()
