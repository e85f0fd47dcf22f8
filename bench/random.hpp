// Small deterministic random numbers: the same on every machine, unlike the standard's shuffles.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace kvferry::bench {

/// Spreads a number over 64 bits (the finaliser of Steele, Lea and Flood's SplitMix64).
constexpr std::uint64_t mix(std::uint64_t value) noexcept {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9ULL;
  value = (value ^ (value >> 27)) * 0x94d049bb133111ebULL;
  return value ^ (value >> 31);
}

class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() noexcept { return mix(state_ += 0x9e3779b97f4a7c15ULL); }
  /// Below `limit`, which is not 0. The bias is 2^-64 of the limit: of no account here.
  std::uint64_t below(std::uint64_t limit) noexcept { return next() % limit; }

 private:
  std::uint64_t state_;
};

template <class T>
void shuffle(std::vector<T>& items, Random& random) {
  for (std::size_t left = items.size(); left > 1; --left) std::swap(items[left - 1], items[random.below(left)]);
}

}  // namespace kvferry::bench
