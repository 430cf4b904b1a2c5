# Run at each build: fills version.cpp.in; the file changes, and is compiled again, only when the commit does.
execute_process(COMMAND git describe --always --exclude=* --dirty=+ WORKING_DIRECTORY "${SOURCE_DIR}"
                OUTPUT_VARIABLE PATHATTN_COMMIT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
if(failed)
  set(PATHATTN_COMMIT unknown)
endif()
configure_file("${SOURCE_DIR}/train/version.cpp.in" "${OUTPUT}" @ONLY)
