# pathattn_test(<name> SOURCES ... LIBRARIES ... [LABELS ...] [LONG ...] [LONG_WITH_THREADS ...])
# A GoogleTest program, registered with CTest under the labels (default: cpu). LONG: patterns of cases that are left out under sanitizers, where they
# would take many minutes; LONG_WITH_THREADS: those left out under the thread sanitizer besides.
# Each run leaves its counts in test-results/<name>.xml of the build folder; scripts/run_tests.py adds them up.
find_package(GTest REQUIRED)
function(pathattn_test name)
  cmake_parse_arguments(TEST "" "" "SOURCES;LIBRARIES;LABELS;LONG;LONG_WITH_THREADS" ${ARGN})
  if(NOT TEST_LABELS)
    set(TEST_LABELS cpu)
  endif()
  add_executable(${name} ${TEST_SOURCES})
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC>)  # as torch's precompiled header; a program would get -fPIE
  target_link_libraries(${name} PRIVATE ${TEST_LIBRARIES} GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE PATHATTN_SOURCE_DIR="${CMAKE_SOURCE_DIR}" PATHATTN_BINARY_DIR="${CMAKE_BINARY_DIR}")
  set(filter "")
  if(PATHATTN_SANITIZE STREQUAL "thread")
    list(APPEND TEST_LONG ${TEST_LONG_WITH_THREADS})
  endif()
  if(PATHATTN_SANITIZE AND TEST_LONG)
    list(JOIN TEST_LONG ":" patterns)
    set(filter "--gtest_filter=-${patterns}")
  endif()
  add_test(NAME ${name} COMMAND ${name} --gtest_brief=1 ${filter})
  set_tests_properties(${name} PROPERTIES LABELS "${TEST_LABELS}")
  # passive: programs run side by side, and a thread that waits by spinning would slow the others.
  set_property(TEST ${name} PROPERTY ENVIRONMENT GTEST_OUTPUT=xml:${CMAKE_BINARY_DIR}/test-results/${name}.xml OMP_WAIT_POLICY=passive)
endfunction()
