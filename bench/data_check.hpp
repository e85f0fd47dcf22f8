// The bytes that travel: a pattern of its own for every block and round, and the proof that they
// arrived, all of them, and nothing beside them.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench/workload.hpp"

namespace kvferry::bench {

/// What a destination holds before a round: no byte may keep it inside a block, or lose it outside.
inline constexpr std::byte poison{0xa5};

/// Identifies the contents of one block in one round.
std::uint64_t block_key(std::uint64_t seed, std::uint64_t round, std::uint64_t block) noexcept;

/// Writes the bytes that belong to `key`.
void fill_block(std::span<std::byte> block, std::uint64_t key) noexcept;

/// Offset of the first byte that differs from what belongs to `key`, or nothing.
std::optional<std::uint64_t> find_difference(std::span<const std::byte> block, std::uint64_t key) noexcept;

/// The byte at `offset` of what belongs to `key`.
std::byte expected_byte(std::uint64_t key, std::uint64_t offset) noexcept;

/// A byte that is not what it should be.
struct Mismatch {
  std::uint32_t part = 0;
  std::optional<std::uint64_t> block;  ///< index in the batch; nothing: outside every block
  std::uint64_t offset = 0;            ///< in the block; outside of blocks, in the region
  std::byte expected{};
  std::byte got{};

  std::string to_string() const;
};

/// Fills every block of every part with its pattern for this round.
void fill_blocks(std::span<std::byte> region, const Workload& workload, Side side, std::uint64_t round);

/// Poisons the part of the region that the workload uses.
void poison_region(std::span<std::byte> region, const Workload& workload);

/// Checks every byte of every block against its pattern, and every byte between the blocks against
/// the poison. Returns the first mismatch.
std::optional<Mismatch> verify_region(std::span<const std::byte> region, const Workload& workload, Side side,
                                      std::uint64_t round);

}  // namespace kvferry::bench
