# One source, many instruction sets: the kernels are compiled once per level, each time in a namespace of their own.
# A level's objects become one relocatable object of which only the table stays visible, so that the linker can never
# take a function that was compiled for one level and give it to somebody else.

set(SOFTDELTA_KERNEL_OPTIMISATION -O3 CACHE STRING "How far kernels are optimised, in all configurations but Debug")

# softdelta_level(name HEADER file SUPPORTED function SHOWN flags... FLAGS flags...): an instruction set: its vectors in
# src/engines/cpu/kernels/simd, whether this CPU has it (src/engines/cpu/machine/isa.cpp), what Linux then shows of it
# beyond the level before, what the compiler needs for it.
function(softdelta_level name)
    cmake_parse_arguments(PARSE_ARGV 1 level "" "HEADER;SUPPORTED" "SHOWN;FLAGS")
    # The AVX-512 headers of g++ 12 read values that they leave undefined on purpose.
    if(level_FLAGS MATCHES "x86-64-v4" AND CMAKE_CXX_COMPILER_ID STREQUAL GNU AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
        list(APPEND level_FLAGS -Wno-uninitialized -Wno-maybe-uninitialized)
    endif()
    set(softdelta_levels ${softdelta_levels} ${name} PARENT_SCOPE)
    set(softdelta_${name}_header "engines/cpu/kernels/simd/${level_HEADER}" PARENT_SCOPE)
    set(softdelta_${name}_supported ${level_SUPPORTED} PARENT_SCOPE)
    set(softdelta_${name}_shown ${level_SHOWN} PARENT_SCOPE)
    set(softdelta_${name}_flags ${level_FLAGS} PARENT_SCOPE)
endfunction()

# All of them, from the least to the best; each extends the one before.
set(softdelta_levels "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64" AND NOT APPLE AND NOT WIN32) # tools for ELF
    set(avx512 -march=x86-64-v4 -mprefer-vector-width=512)
    softdelta_level(x86-64-v2 HEADER x86/x86_128.h SUPPORTED has_x86_64_v2 SHOWN sse4_2 FLAGS -march=x86-64-v2)
    softdelta_level(avx2 HEADER x86/x86_256.h SUPPORTED has_avx2 SHOWN avx2 fma bmi2 f16c movbe
        FLAGS -march=x86-64-v3)
    softdelta_level(avx512 HEADER x86/x86_512.h SUPPORTED has_avx512 SHOWN avx512f avx512bw avx512cd avx512dq avx512vl
        FLAGS ${avx512})
    softdelta_level(avx512bf16 HEADER x86/x86_bf16.h SUPPORTED has_avx512bf16 SHOWN avx512_bf16
        FLAGS ${avx512} -mavx512bf16)
    if(SOFTDELTA_EMULATED_TILES)
        softdelta_level(amxbf16 HEADER emulated/level.h SUPPORTED has_avx2 SHOWN avx2
            FLAGS -march=x86-64-v3 -Wno-psabi) # no other compiler is passed its vectors
    else()
        softdelta_level(amxbf16 HEADER x86/amx.h SUPPORTED has_amxbf16 SHOWN amx_tile amx_bf16 avx512vbmi avx512ifma
            FLAGS ${avx512} -mavx512bf16 -mavx512vbmi -mavx512ifma -mamx-tile -mamx-bf16)
    endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64" AND NOT APPLE)
    softdelta_level(neon HEADER arm/neon.h SUPPORTED has_neon SHOWN asimd FLAGS -march=armv8-a)
    softdelta_level(neon_bf16 HEADER arm/neon_bf16.h SUPPORTED has_neon_bf16 SHOWN bf16 FLAGS -march=armv8.2-a+bf16)
endif()
set(SOFTDELTA_ISA_LEVELS "${softdelta_levels}" CACHE STRING
    "Instruction sets that the fast kernels are compiled for; native: the best of this machine")
if(SOFTDELTA_ISA_LEVELS STREQUAL native)
    file(STRINGS /proc/cpuinfo shown REGEX "^(flags|Features)" LIMIT_COUNT 1)
    string(REGEX MATCHALL "[a-z0-9_]+" shown "${shown}")
    set(native "")
    foreach(level IN LISTS softdelta_levels)
        set(missing ${softdelta_${level}_shown})
        list(REMOVE_ITEM missing ${shown})
        if(missing)
            break()
        endif()
        set(native ${level})
    endforeach()
    set(SOFTDELTA_ISA_LEVELS "${native}" CACHE STRING "" FORCE)
endif()

if(SOFTDELTA_ISA_LEVELS)
    find_path(SOFTDELTA_XSIMD_INCLUDE_DIR xsimd/xsimd.hpp REQUIRED) # its own package file asks for xtl
    find_program(SOFTDELTA_LD NAMES ld.bfd ld REQUIRED)             # GNU ld alone has --force-group-allocation
endif()

# What isa.cpp includes: the list, with the tables of the levels that are compiled.
list(LENGTH softdelta_levels softdelta_level_count)
set(softdelta_level_tables "")
set(softdelta_level_rows "")
foreach(level IN LISTS softdelta_levels)
    set(table nullptr)
    if(level IN_LIST SOFTDELTA_ISA_LEVELS)
        string(MAKE_C_IDENTIFIER softdelta_kernels_${level} name)
        string(APPEND softdelta_level_tables "extern \"C\" const softdelta::kernels::Table ${name};\n")
        set(table "&${name}")
    endif()
    string(APPEND softdelta_level_rows " \\\n    Level{\"${level}\", ${table}, ${softdelta_${level}_supported}()},")
endforeach()
file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/isa_levels/isa_levels.h CONTENT "// Written by cmake/isa_levels.cmake.
@softdelta_level_tables@#define SOFTDELTA_LEVEL_COUNT @softdelta_level_count@
#define SOFTDELTA_LEVELS@softdelta_level_rows@
" @ONLY)

# softdelta_compile_for(target level): its flags, and what the sources in kernels/ ask for.
function(softdelta_compile_for target level)
    if(NOT level IN_LIST softdelta_levels)
        message(FATAL_ERROR "SOFTDELTA_ISA_LEVELS: ${level} is none of ${softdelta_levels}")
    endif()
    string(MAKE_C_IDENTIFIER ${level} identifier)
    target_compile_options(${target} PRIVATE ${softdelta_${level}_flags})
    target_compile_definitions(${target} PRIVATE SOFTDELTA_ISA_NAMESPACE=${identifier}
        SOFTDELTA_ISA_HEADER="${softdelta_${level}_header}")
    target_include_directories(${target} SYSTEM PRIVATE ${SOFTDELTA_XSIMD_INCLUDE_DIR})
endfunction()

# softdelta_add_isa_level(target level SOURCES...): compiles SOURCES for this level and adds the object to the target,
# whose property SOFTDELTA_ISA_OBJECTS lists such objects.
function(softdelta_add_isa_level target level)
    string(MAKE_C_IDENTIFIER softdelta_kernels_${level} kernels)
    add_library(${kernels} OBJECT ${ARGN})
    softdelta_compile_for(${kernels} ${level})
    target_compile_options(${kernels} PRIVATE -fno-exceptions -fno-rtti -fno-lto
        $<$<NOT:$<CONFIG:Debug>>:${SOFTDELTA_KERNEL_OPTIMISATION}>
        $<$<CXX_COMPILER_ID:GNU>:-fno-gnu-unique>)
    target_compile_definitions(${kernels} PRIVATE SOFTDELTA_ISA_NAME="${level}" SOFTDELTA_ISA_TABLE=${kernels})
    target_link_libraries(${kernels} PRIVATE softdelta_common_flags)

    if(SOFTDELTA_UNITY_BUILD) # most of the code of a family is what its sources share
        foreach(family delta_rule attention layer) # in the order of the list: what takes longest stands first
            set(sources ${ARGN})
            list(FILTER sources INCLUDE REGEX "kernels/${family}/")
            softdelta_compile_as_one(${kernels} kernels_${family} SOURCES ${sources})
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
    set_property(TARGET ${target} APPEND PROPERTY SOFTDELTA_ISA_OBJECTS ${object})
endfunction()
