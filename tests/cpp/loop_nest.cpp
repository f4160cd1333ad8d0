#include <exception>
#include <string>

#include "expect.h"
#include "warpsmith/loop_nest.h"

using warpsmith::LoopNest;

int main() {
  {  // dense: everything merges into one dim
    LoopNest<2> nest;
    nest.add_dim(2, {15, 15});
    nest.add_dim(3, {5, 5});
    nest.add_dim(5, {1, 1});
    nest.merge();
    EXPECT(nest.num_dims == 1 && nest.sizes[0] == 30 && nest.strides[0][0] == 1);
  }
  {  // dims are ordered by the first operand, whatever order they come in
    LoopNest<2> nest;
    nest.add_dim(5, {1, 7});
    nest.add_dim(2, {15, 1});
    nest.add_dim(3, {5, 2});
    nest.merge();
    EXPECT(nest.num_dims == 3);
    EXPECT(nest.sizes[0] == 5 && nest.sizes[1] == 3 && nest.sizes[2] == 2);
    EXPECT(nest.strides[0][1] == 7 && nest.strides[1][1] == 2 && nest.strides[2][1] == 1);
  }
  {  // one operand that cannot merge keeps the dims apart
    LoopNest<2> nest;
    nest.add_dim(3, {5, 8});
    nest.add_dim(5, {1, 1});
    nest.merge();
    EXPECT(nest.num_dims == 2 && nest.sizes[0] == 5 && nest.strides[1][1] == 8);
  }
  {  // an outer pair merges behind an inner dim that does not
    LoopNest<1> nest;
    nest.add_dim(4, {60});
    nest.add_dim(3, {20});
    nest.add_dim(5, {1});
    nest.merge();
    EXPECT(nest.num_dims == 2 && nest.sizes[1] == 12 && nest.strides[1][0] == 20);
  }
  {  // size 1 says nothing about strides; expanded dims merge with each other
    LoopNest<1> nest;
    nest.add_dim(1, {123});
    nest.add_dim(4, {0});
    nest.add_dim(6, {0});
    nest.add_dim(1, {-5});
    nest.merge();
    EXPECT(nest.num_dims == 1 && nest.sizes[0] == 24 && nest.strides[0][0] == 0);
  }
  {
    LoopNest<1> nest;
    nest.merge();
    EXPECT(nest.num_dims == 0);
    for (int i = 0; i < warpsmith::kMaxLoopDims; ++i) nest.add_dim(2, {3});
    EXPECT_THROWS((nest.add_dim(2, {3}), 0), "more than 40 dims");
  }
  return failures;
}
