// FlashInfer's rotation by a cache of cos and sin as a C function, so that `make gpu` times it without its package. With
// the headers of flashinfer-python (D is its folder flashinfer/data) and a compiler of CUDA, for the GPU that will run it:
//
//   nvcc -O3 -std=c++17 -arch=sm_90a -shared -Xcompiler -fPIC -cudart static --expt-relaxed-constexpr \
//       -DFLASHINFER_ENABLE_BF16 -I D/include -I D/cccl/libcudacxx/include -I D/cccl/cub -I D/cccl/thrust \
//       -o PEERS/flashinfer_rope.so benchmarks/flashinfer_rope.cu
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <flashinfer/pos_enc.cuh>

// Rotates q and k in place; strides are in elements. Returns a cudaError_t.
extern "C" int rope_bf16(void* q, void* k, float* cos_sin, int64_t* rows, uint32_t tokens, uint32_t q_heads,
                         uint32_t k_heads, uint32_t head_dim, int64_t q_token, int64_t q_head, int64_t k_token,
                         int64_t k_head, void* stream) {
  auto* queries = static_cast<__nv_bfloat16*>(q);
  auto* keys = static_cast<__nv_bfloat16*>(k);
  return static_cast<int>(flashinfer::BatchQKApplyRotaryPosIdsCosSinCache<__nv_bfloat16, int64_t>(
      queries, keys, queries, keys, cos_sin, rows, tokens, q_heads, k_heads, head_dim, head_dim, q_token, q_head,
      k_token, k_head, q_token, q_head, k_token, k_head, /*interleave=*/false, static_cast<cudaStream_t>(stream)));
}
