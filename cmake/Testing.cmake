# pathattn_test(<name> SOURCES ... LIBRARIES ... [LABELS ...]): a GoogleTest program, registered with CTest under the labels (default: cpu).
# Each run leaves its counts in test-results/<name>.xml of the build folder; scripts/run_tests.py adds them up.
find_package(GTest REQUIRED)
function(pathattn_test name)
  cmake_parse_arguments(TEST "" "" "SOURCES;LIBRARIES;LABELS" ${ARGN})
  if(NOT TEST_LABELS)
    set(TEST_LABELS cpu)
  endif()
  add_executable(${name} ${TEST_SOURCES})
  target_link_libraries(${name} PRIVATE ${TEST_LIBRARIES} GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE PATHATTN_SOURCE_DIR="${CMAKE_SOURCE_DIR}" PATHATTN_BINARY_DIR="${CMAKE_BINARY_DIR}")
  add_test(NAME ${name} COMMAND ${name} --gtest_brief=1)
  set_tests_properties(${name} PROPERTIES LABELS "${TEST_LABELS}" ENVIRONMENT "GTEST_OUTPUT=xml:${CMAKE_BINARY_DIR}/test-results/${name}.xml")
endfunction()
