// Names a block by all tokens up to its end, so that equal prefixes are found whoever computed them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

namespace kvferry {

using TokenId = std::uint32_t;

/// 128 bits over a block's tokens and the hash of the block before it. Equal on all machines of one
/// byte order. XXH3 is fast but not secret: whoever knows the salt could make two prefixes collide, so
/// give a random salt where tenants that must not see each other's blocks share a pool.
struct PrefixHash {
  std::uint64_t low = 0;
  std::uint64_t high = 0;

  friend bool operator==(const PrefixHash&, const PrefixHash&) = default;
};

struct PrefixHasher {
  std::size_t operator()(const PrefixHash& hash) const noexcept { return static_cast<std::size_t>(hash.low); }
};

/// Where a chain begins. The salt parts what must not be shared although its tokens are equal: models,
/// adapters, images, tenants.
PrefixHash hash_salt(std::string_view salt) noexcept;

/// The hash of a block with these tokens after a block (or salt) with that hash.
PrefixHash hash_block(const PrefixHash& before, std::span<const TokenId> tokens) noexcept;

/// The hashes of all full blocks of `tokens`; a rest that does not fill a block has none.
/// block_tokens is at least 1.
std::vector<PrefixHash> hash_prefix(std::span<const TokenId> tokens, std::uint32_t block_tokens,
                                    std::string_view salt = {});

}  // namespace kvferry
