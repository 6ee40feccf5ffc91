# ikattn_add_kernel(name source [isas...]): compiles one torch-free source once per instruction set into
# ikattn_kernels, by default for all of IKATTN_ISAS.
#
# Each copy sees IKATTN_ISA, the name of its instruction set, and keeps everything in a namespace of that
# name. The glue chooses between them at run time; IKATTN_HAVE_AVX2 and the like tell it which exist.
set(IKATTN_ISA "all" CACHE STRING "Instruction sets: all, or native, those of this processor alone")
if(NOT IKATTN_ISA MATCHES "^(all|native)$")
  message(FATAL_ERROR "IKATTN_ISA must be all or native, got ${IKATTN_ISA}")
endif()
set(IKATTN_ISAS baseline)
set(IKATTN_FLAGS_baseline "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64)$")
  list(APPEND IKATTN_ISAS avx2 avx512)
  set(IKATTN_FLAGS_avx2 -mavx2 -mfma -mf16c)
  set(IKATTN_FLAGS_avx512 -mavx512f -mavx512dq -mavx512bw -mavx512vl ${IKATTN_FLAGS_avx2})
  # AVX-512 with products of 16 bits that are faster than those of float32
  set(IKATTN_SIXTEEN_BIT_ISAS avx512_vnni avx512_bf16 amx)
  set(IKATTN_FLAGS_avx512_vnni -mavx512vnni ${IKATTN_FLAGS_avx512})
  set(IKATTN_FLAGS_avx512_bf16 -mavx512bf16 ${IKATTN_FLAGS_avx512_vnni})
  set(IKATTN_FLAGS_amx -mamx-tile -mamx-bf16 ${IKATTN_FLAGS_avx512_bf16})
endif()

# Leaves the sets that a process takes on this processor (instruction_set.h). With AMX, for which a
# process has to ask the system, also what it takes where the system says no.
if(IKATTN_ISA STREQUAL "native" AND "avx2" IN_LIST IKATTN_ISAS)
  file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1)
  file(STRINGS /proc/cpuinfo amd REGEX "^vendor_id.*AuthenticAMD" LIMIT_COUNT 1)
  string(REGEX MATCHALL "[a-z0-9_]+" flags "${flags}")
  function(ikattn_processor_has result)
    set(${result} ON PARENT_SCOPE)
    foreach(flag IN LISTS ARGN)
      if(NOT flag IN_LIST flags)
        set(${result} OFF PARENT_SCOPE)
      endif()
    endforeach()
  endfunction()
  ikattn_processor_has(has_avx2 avx2 fma)
  ikattn_processor_has(has_avx512 avx512f avx512dq avx512bw avx512vl)
  ikattn_processor_has(has_vnni avx512_vnni)
  ikattn_processor_has(has_bf16 avx512_bf16)
  ikattn_processor_has(has_amx amx_tile amx_bf16)
  set(IKATTN_SIXTEEN_BIT_ISAS "")
  if(has_avx512)
    set(IKATTN_ISAS avx512)
    if(has_vnni AND has_bf16 AND amd)
      list(APPEND IKATTN_SIXTEEN_BIT_ISAS avx512_bf16)
    elseif(has_vnni)
      list(APPEND IKATTN_SIXTEEN_BIT_ISAS avx512_vnni)
    endif()
    if(has_vnni AND has_bf16 AND has_amx)
      list(APPEND IKATTN_SIXTEEN_BIT_ISAS amx)
    endif()
  elseif(has_avx2)
    set(IKATTN_ISAS avx2)
  else()
    set(IKATTN_ISAS baseline)
  endif()
endif()

function(ikattn_add_kernel name source)
  set(isas ${IKATTN_ISAS})
  if(ARGN)
    set(isas ${ARGN})
  endif()
  foreach(isa IN LISTS isas)
    set(target ikattn_${name}_${isa})
    add_library(${target} OBJECT ${source})
    target_compile_definitions(${target} PRIVATE IKATTN_ISA=${isa})
    target_compile_options(
      ${target}
      PRIVATE -Wall
              -Wextra
              -O3
              -fno-math-errno
              -fno-trapping-math
              -ffp-contract=fast
              ${IKATTN_FLAGS_${isa}})
    target_compile_options(${target} PRIVATE -include support/portable.h)
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/csrc
                                                 ${PROJECT_SOURCE_DIR}/csrc/include)
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
    target_sources(ikattn_kernels PRIVATE $<TARGET_OBJECTS:${target}>)
  endforeach()
endfunction()

# Tells the operators of a target which sets exist.
function(ikattn_tell_isas target)
  foreach(isa IN LISTS IKATTN_ISAS IKATTN_SIXTEEN_BIT_ISAS)
    string(TOUPPER ${isa} isa)
    target_compile_definitions(${target} PRIVATE IKATTN_HAVE_${isa}=1)
  endforeach()
endfunction()
