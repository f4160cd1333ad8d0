// Members of the string streams that g++ 11 and later otherwise take from the machine's libstdc++
// (GLIBCXX_3.4.26 and 3.4.29, newer than manylinux_2_28). torch's STD_TORCH_CHECK uses them.
#include <sstream>

template std::stringstream::basic_stringstream();
template std::ostringstream::basic_ostringstream();
#if __cplusplus > 201703L
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;
#endif
