// Numbers as they travel: little-endian, whatever the host.
#pragma once

#include <cstddef>

namespace kvferry::verbs {

/// Writes the number and moves on behind it.
template <class T>
void put(std::byte*& to, T value) noexcept {
  for (std::size_t i = 0; i < sizeof(T); ++i) *to++ = static_cast<std::byte>(value >> (8 * i));
}

/// Reads what put() wrote.
template <class T>
void get(const std::byte*& from, T& value) noexcept {
  value = 0;
  for (std::size_t i = 0; i < sizeof(T); ++i) value |= static_cast<T>(static_cast<T>(*from++) << (8 * i));
}

}  // namespace kvferry::verbs
