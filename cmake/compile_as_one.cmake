# Sources of a family become one file, which reads their headers once, and makes the code that comes from them once.
# ccache knows a file by its path: it lies where another project's build has it, too.
set(SOFTDELTA_ONE_FILE_FOLDER ${CMAKE_BINARY_DIR}/one_file)

# softdelta_compile_as_one(target name BEFORE lines SOURCES files...): BEFORE stands before each source.
function(softdelta_compile_as_one target name)
    cmake_parse_arguments(PARSE_ARGV 2 arg "" "BEFORE" "SOURCES")
    get_target_property(folder ${target} SOURCE_DIR)
    cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/src OUTPUT_VARIABLE within)
    set(text "")
    list(GET arg_SOURCES 0 first)
    cmake_path(GET first EXTENSION LAST_ONLY extension)
    foreach(source IN LISTS arg_SOURCES)
        get_property(own SOURCE ${folder}/${source} TARGET_DIRECTORY ${target} PROPERTY COMPILE_DEFINITIONS)
        if(own) # stays alone: a file has the definitions of all
            continue()
        endif()
        cmake_path(APPEND within ${source} OUTPUT_VARIABLE path)
        cmake_path(NORMAL_PATH path)
        string(APPEND text "${arg_BEFORE}// NOLINTNEXTLINE(bugprone-suspicious-include)\n#include \"${path}\"\n")
        set_source_files_properties(${folder}/${source} TARGET_DIRECTORY ${target} PROPERTIES HEADER_FILE_ONLY ON)
    endforeach()
    string(SHA1 hash "${text}")
    string(SUBSTRING ${hash} 0 8 hash)
    set(file ${SOFTDELTA_ONE_FILE_FOLDER}/${name}_${hash}${extension})
    file(MAKE_DIRECTORY ${SOFTDELTA_ONE_FILE_FOLDER})
    file(LOCK ${SOFTDELTA_ONE_FILE_FOLDER} DIRECTORY GUARD FUNCTION TIMEOUT 60)
    file(CONFIGURE OUTPUT ${file} CONTENT "${text}" @ONLY)
    set_property(DIRECTORY ${PROJECT_SOURCE_DIR} APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file}) # may be wiped
    target_sources(${target} PRIVATE ${file})
endfunction()
