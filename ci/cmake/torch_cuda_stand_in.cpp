// What the stable ABI offers from libtorch_cuda.so at version 2.11. Only the names matter: the
// linker records the library as needed, and ci/artifact.py checks undefined symbols against it.
extern "C" {
#define STAND_IN(NAME) \
  void NAME() {}
STAND_IN(aoti_torch_create_cuda_guard)
STAND_IN(aoti_torch_delete_cuda_guard)
STAND_IN(aoti_torch_cuda_guard_set_index)
STAND_IN(aoti_torch_create_cuda_stream_guard)
STAND_IN(aoti_torch_delete_cuda_stream_guard)
STAND_IN(aoti_torch_get_current_cuda_stream)
STAND_IN(torch_get_current_cuda_blas_handle)
STAND_IN(torch_set_current_cuda_stream)
STAND_IN(torch_get_cuda_stream_from_pool)
STAND_IN(torch_cuda_stream_synchronize)
STAND_IN(torch_c10_cuda_check_msg)
STAND_IN(torch_c10_cuda_free_error_msg)
}
