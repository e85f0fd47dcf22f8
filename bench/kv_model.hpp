// How much KV cache a token of a known model takes, and in which blocks it is paged.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include <kvferry/runtime/status.hpp>

namespace kvferry::bench {

/// The KV cache of one model as one rank holds it. Every block is contiguous; there is one for each
/// layer and part (K and V, or the single latent of MLA) of every `block_tokens` tokens.
struct KvModel {
  std::string_view name;
  std::uint32_t layers = 0;
  std::uint32_t parts = 0;         ///< 2: K and V; 1: MLA
  std::uint32_t values = 0;        ///< of one token in one block: KV heads x head size, or the latent
  std::uint32_t value_bytes = 0;   ///< 2: bf16
  std::uint32_t block_tokens = 0;  ///< tokens of one page

  constexpr std::uint64_t block_bytes() const noexcept { return std::uint64_t{values} * value_bytes * block_tokens; }
  /// Blocks that one page of tokens has: one for each layer and part.
  constexpr std::uint32_t planes() const noexcept { return layers * parts; }
  constexpr std::uint64_t bytes_per_token() const noexcept { return std::uint64_t{planes()} * values * value_bytes; }
  constexpr std::uint64_t page_bytes() const noexcept { return planes() * block_bytes(); }
};

std::span<const KvModel> known_models() noexcept;

/// The model of that name; the error lists the known ones.
Result<KvModel> find_model(std::string_view name);

}  // namespace kvferry::bench
