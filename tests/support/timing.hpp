// Time bounds of tests: as promised on a free machine, stretched where a build or a machine is slower.
#pragma once

#include <chrono>
#include <cstdlib>

namespace kvferry::test {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif

/// By how much time bounds are stretched: 1, under sanitizers 4; KVFERRY_TEST_SLOWNESS replaces it.
inline int slowness() {
  static const int factor = [] {
    const char* given = std::getenv("KVFERRY_TEST_SLOWNESS");
    const int value = given != nullptr ? std::atoi(given) : 0;
    return value > 0 ? value : sanitized ? 4 : 1;
  }();
  return factor;
}

template <class Rep, class Period>
auto slow(std::chrono::duration<Rep, Period> bound) {
  return bound * slowness();
}

}  // namespace kvferry::test
