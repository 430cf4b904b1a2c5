# PyTorch from a wheel, without find_package(Torch), which fails where a CUDA wheel meets no CUDA toolkit and leaves out -fopenmp.
execute_process(
  COMMAND "${PATHATTN_PYTHON}" -c "import os,torch;print(os.path.dirname(torch.__file__),int(torch.compiled_with_cxx11_abi()),torch.__version__,sep=';')"
  OUTPUT_VARIABLE torch_facts OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_VARIABLE torch_error RESULT_VARIABLE torch_failed)
if(torch_failed)
  message(FATAL_ERROR "No PyTorch in ${PATHATTN_PYTHON}: run `make setup`, or name a Python that has it with -DPATHATTN_PYTHON=...\n${torch_error}")
endif()
list(GET torch_facts 0 TORCH_DIR)
list(GET torch_facts 1 TORCH_ABI)
list(GET torch_facts 2 TORCH_VERSION)
message(STATUS "PyTorch ${TORCH_VERSION} in ${TORCH_DIR}")

add_library(torch::torch INTERFACE IMPORTED)
target_compile_options(torch::torch INTERFACE     # -idirafter: torch bundles an fmt that would shadow the system's
  "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter ${TORCH_DIR}/include/torch/csrc/api/include>"
  "$<$<COMPILE_LANGUAGE:CXX>:SHELL:-idirafter ${TORCH_DIR}/include>"   # nvcc has no -idirafter: .cu files stay free of torch
  $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)            # without it at::parallel_for runs one chunk
target_compile_definitions(torch::torch INTERFACE _GLIBCXX_USE_CXX11_ABI=${TORCH_ABI})
target_link_directories(torch::torch INTERFACE "${TORCH_DIR}/lib")
# stdc++ first: torch's libraries export a broken std::filesystem of their own (remove_all crashes), which would be bound instead.
target_link_libraries(torch::torch INTERFACE stdc++ torch torch_cpu c10)
target_link_options(torch::torch INTERFACE -Wl,--no-as-needed)  # no -rpath: CMake sets one in the build folder, which a wheel does not keep

if(PATHATTN_CUDA_ENABLED)
  if(EXISTS "${TORCH_DIR}/lib/libc10_cuda.so")
    add_library(torch::cuda INTERFACE IMPORTED)
    target_link_libraries(torch::cuda INTERFACE torch::torch torch_cuda c10_cuda CUDA::cudart)
  else()
    message(STATUS "This PyTorch has no CUDA: the kernels are built, the operators run on CPUs alone")
  endif()
endif()

# Tensors' operations, JSON and fmt take 10 s to parse: precompiled once, for every target from data/ on. All of torch/torch.h would take 6 s to load.
if(NOT SKBUILD)  # a wheel needs neither JSON nor fmt
  add_library(torch_pch OBJECT cmake/torch_pch.cpp)
  target_link_libraries(torch_pch PUBLIC torch::torch pathattn_base)
  target_precompile_headers(torch_pch PRIVATE <ATen/ATen.h> <fmt/format.h> <nlohmann/json.hpp>)
endif()
