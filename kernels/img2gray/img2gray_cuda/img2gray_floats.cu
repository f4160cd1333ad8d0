#include "img2gray_cuda/img2gray_fwd.cuh"

namespace img2gray {

IMG2GRAY_LAUNCHER(Half);
IMG2GRAY_LAUNCHER(BFloat16);
IMG2GRAY_LAUNCHER(float);
IMG2GRAY_LAUNCHER(double);

}  // namespace img2gray
