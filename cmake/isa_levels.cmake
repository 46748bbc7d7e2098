# One source, many instruction sets: the kernels are compiled once per level, each time in a namespace of their own.
# A level's objects become one relocatable object of which only the table stays visible, so that the linker can never
# take a function that was compiled for one level and give it to somebody else.

if(SOFTDELTA_ISA_LEVELS)
    find_path(SOFTDELTA_XSIMD_INCLUDE_DIR xsimd/xsimd.hpp REQUIRED) # its own package file asks for xtl
    find_program(SOFTDELTA_LD NAMES ld.bfd ld REQUIRED)             # GNU ld alone has --force-group-allocation
endif()

set(SOFTDELTA_KERNEL_OPTIMISATION -O3 CACHE STRING "How far kernels are optimised, in all configurations but Debug")

# softdelta_native_level(): puts the best level of this machine in the place of "native".
function(softdelta_native_level)
    if(NOT SOFTDELTA_ISA_LEVELS STREQUAL native)
        return()
    endif()
    file(STRINGS /proc/cpuinfo flags REGEX "^flags" LIMIT_COUNT 1)
    string(REGEX MATCHALL "[a-z0-9_]+" flags "${flags}")
    set(avx2 avx2 fma bmi2 f16c movbe)
    set(avx512 avx512f avx512bw avx512cd avx512dq avx512vl)
    set(avx512bf16 avx512_bf16)
    set(amxbf16 amx_tile amx_bf16)
    set(level x86-64-v2)
    foreach(next IN ITEMS avx2 avx512 avx512bf16 amxbf16)
        list(REMOVE_ITEM ${next} ${flags})
        if(${next}) # missing
            break()
        endif()
        set(level ${next})
    endforeach()
    set(SOFTDELTA_ISA_LEVELS ${level} CACHE STRING "" FORCE)
endfunction()

# softdelta_isa_flags(level variable): what the compiler needs for this level.
function(softdelta_isa_flags level variable)
    set(x86-64-v2 -march=x86-64-v2)
    set(avx2 -march=x86-64-v3)
    set(avx512 -march=x86-64-v4 -mprefer-vector-width=512)
    set(avx512bf16 ${avx512} -mavx512bf16)
    set(amxbf16 ${avx512bf16} -mamx-tile -mamx-bf16)
    if(SOFTDELTA_EMULATED_TILES)
        set(amxbf16 ${avx2} -DSOFTDELTA_EMULATED_TILES -Wno-psabi) # no other compiler is passed its vectors
    endif()
    if(NOT ${level})
        message(FATAL_ERROR "SOFTDELTA_ISA_LEVELS: ${level} is none of x86-64-v2 avx2 avx512 avx512bf16 amxbf16")
    endif()
    # The AVX-512 headers of g++ 12 read values that they leave undefined on purpose.
    if(level MATCHES "avx512|amx" AND CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
        list(APPEND ${level} -Wno-uninitialized -Wno-maybe-uninitialized)
    endif()
    set(${variable} ${${level}} PARENT_SCOPE)
endfunction()

# softdelta_add_isa_level(target level SOURCES...): compiles SOURCES for this level and adds the object to the target,
# whose property SOFTDELTA_ISA_OBJECTS lists such objects.
function(softdelta_add_isa_level target level)
    softdelta_isa_flags(${level} flags)
    string(MAKE_C_IDENTIFIER ${level} identifier)
    set(kernels softdelta_kernels_${identifier})
    add_library(${kernels} OBJECT ${ARGN})
    target_compile_options(${kernels} PRIVATE ${flags} -fno-exceptions -fno-rtti -fno-lto
        $<$<NOT:$<CONFIG:Debug>>:${SOFTDELTA_KERNEL_OPTIMISATION}>
        $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
    target_compile_definitions(${kernels} PRIVATE SOFTDELTA_ISA_NAME="${level}" SOFTDELTA_ISA_NAMESPACE=${identifier}
        SOFTDELTA_ISA_TABLE=${kernels})
    target_include_directories(${kernels} SYSTEM PRIVATE ${SOFTDELTA_XSIMD_INCLUDE_DIR})
    target_link_libraries(${kernels} PRIVATE softdelta_common_flags)

    if(SOFTDELTA_BY_FOLDER) # the forward passes share most of their code
        set_target_properties(${kernels} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP
            UNITY_BUILD_CODE_BEFORE_INCLUDE "// NOLINTNEXTLINE(bugprone-suspicious-include)")
        foreach(source IN LISTS ARGN)
            if(source MATCHES "delta_rule/forward/")
                set_source_files_properties(${source} PROPERTIES UNITY_GROUP forward)
            endif()
        endforeach()
    endif()

    # Groups of sections are dissolved: the linker would merge them with another level's by name.
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${kernels}.o)
    add_custom_command(OUTPUT ${object}
        COMMAND ${SOFTDELTA_LD} -r --force-group-allocation -o ${object} $<TARGET_OBJECTS:${kernels}>
        COMMAND ${CMAKE_OBJCOPY} --keep-global-symbol=${kernels} ${object}
        DEPENDS ${kernels} $<TARGET_OBJECTS:${kernels}>
        COMMENT "Linking the kernels of ${level}"
        COMMAND_EXPAND_LISTS VERBATIM)
    set_source_files_properties(${object} PROPERTIES GENERATED ON EXTERNAL_OBJECT ON)
    target_sources(${target} PRIVATE ${object})
    # One source asks: the others are the same for any choice of levels.
    set_property(SOURCE engines/cpu/machine/isa.cpp APPEND PROPERTY COMPILE_DEFINITIONS SOFTDELTA_HAS_${identifier})
    set_property(TARGET ${target} APPEND PROPERTY SOFTDELTA_ISA_OBJECTS ${object})
endfunction()
