# What PATHATTN_CUDA asks for. This version has CPU kernels alone, so nothing here looks for a toolkit or a GPU.
if(PATHATTN_CUDA STREQUAL "ON")
  message(FATAL_ERROR "PATHATTN_CUDA=ON, but this version has no CUDA kernels: use AUTO or OFF.")
elseif(PATHATTN_CUDA STREQUAL "AUTO")
  message(STATUS "CUDA: off, this version has CPU kernels only")
elseif(NOT PATHATTN_CUDA STREQUAL "OFF")
  message(FATAL_ERROR "PATHATTN_CUDA is ${PATHATTN_CUDA}: AUTO, ON and OFF are allowed.")
endif()
