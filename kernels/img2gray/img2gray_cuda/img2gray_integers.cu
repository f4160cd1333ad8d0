#include "img2gray_cuda/img2gray_fwd.cuh"

namespace img2gray {

IMG2GRAY_LAUNCHER(uint8_t);
IMG2GRAY_LAUNCHER(uint16_t);

}  // namespace img2gray
