// C interface of the CUDA library: rules for all functions, version, devices.
//
// exl/cuda/<family>.h declares the functions of an op family and their operands, and documents the
// memory layouts that the library and its caller share. The families are linear, trellis,
// rings, attention, cache, elementwise, moe, recurrent and sampling.
//
// The library knows neither Python nor torch. It allocates no device memory: the caller owns all of
// it, including weights and workspaces. All work is enqueued on `stream`, and no function waits for
// it. A function returns 0 or the cudaError_t of its failure. Operands outside of the documented
// ranges return cudaErrorInvalidValue (1) before anything is launched.
//
// The library sees pointers and sizes and cannot check shapes. The caller does
// (exl_core/ops/backends/cuda/): it takes all sizes from its tensors, and checks the page ids of a
// batch and the strides of new keys and values.
//
// Pointers are device pointers and aligned to 16 bytes unless stated otherwise. Types are the
// numbers of exl::DType (exl/tensor_view.h): 0 float32, 1 float16, 2 bfloat16, 5 uint8, 6 int8,
// 7 float8_e4m3fn.
//
// Every kernel may start before the previous kernel in the stream has ended (programmatic dependent
// launch). Before griddepcontrol.wait it reads weights only, which no kernel writes once a model
// runs. Every block executes the wait before it ends. Cache kernels and recurrent kernels also read
// two other things before the wait: operands that no function of this library writes (page tables,
// lengths, slots, cosines and sines), and keys, values and states of earlier passes. Between two
// passes over one cache, the caller must therefore put other work into the stream, such as a copy
// of the next tokens, or launch another graph.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EXL_CUDA_API __attribute__((visibility("default")))
#define EXL_CUDA_ABI 22

EXL_CUDA_API int exl_cuda_abi(void);
EXL_CUDA_API const char* exl_cuda_error_name(int code);
EXL_CUDA_API const char* exl_cuda_error_text(int code);
// Versions in CUDA's encoding: 13000 for 13.0. A driver version of 0 means that there is no driver.
EXL_CUDA_API int exl_cuda_versions(int* driver, int* runtime);
// Compute capabilities that the library has machine code for, separated by spaces: "80 86 89 90".
EXL_CUDA_API const char* exl_cuda_architectures(void);
// Creates the primary context of a device, which all libraries of the process share, and makes it
// the current device of the calling thread.
EXL_CUDA_API int exl_cuda_open_device(int device);
// Queries and caches attributes of the current device, such as the number of multiprocessors. The
// first function that needs them does the same. An early call keeps the queries out of a graph
// capture.
EXL_CUDA_API int exl_cuda_prepare_device(void);
// Calls function(data) on a thread of the driver after the work that the stream has so far. Later
// work of the stream waits for it. The function may not call CUDA.
EXL_CUDA_API int exl_cuda_host_call(void (*function)(void* data), void* data, void* stream);

#ifdef __cplusplus
}
#endif
