# ikattn_add_kernel(name source [isas...]): compiles one torch-free source once per instruction set into
# ikattn, by default for all of IKATTN_ISAS.
#
# Each copy sees IKATTN_ISA, the name of its instruction set, and keeps everything in a namespace of that
# name. The glue chooses between them at run time; IKATTN_HAVE_X86_ISAS tells it that all of them exist.
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
    target_include_directories(${target} PRIVATE ${PROJECT_SOURCE_DIR}/csrc
                                                 ${PROJECT_SOURCE_DIR}/csrc/include)
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
    target_sources(ikattn PRIVATE $<TARGET_OBJECTS:${target}>)
  endforeach()
  if("avx512" IN_LIST IKATTN_ISAS)
    target_compile_definitions(ikattn PRIVATE IKATTN_HAVE_X86_ISAS=1)
  endif()
endfunction()
