// How often a program takes memory from the heap.
#pragma once

#include <cstdint>

namespace kvferry::bench {

/// Calls of operator new by all threads since the program began. Linking allocations.cpp replaces that operator.
std::uint64_t allocations() noexcept;

}  // namespace kvferry::bench
