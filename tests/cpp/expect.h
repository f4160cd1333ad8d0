// Host checks of the shared headers: a program that returns the number of failures.
#pragma once

#include <cstdio>

inline int failures = 0;

#define EXPECT(condition)                                                 \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::printf("%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      ++failures;                                                         \
    }                                                                     \
  } while (0)

#define EXPECT_THROWS(expression, word)                                                  \
  do {                                                                                   \
    bool named = false;                                                                  \
    try {                                                                                \
      (void)(expression);                                                                \
    } catch (const std::exception& error) {                                              \
      named = std::string(error.what()).find(word) != std::string::npos;                 \
      if (!named) std::printf("%s:%d: message: %s\n", __FILE__, __LINE__, error.what()); \
    }                                                                                    \
    EXPECT(named);                                                                       \
  } while (0)
