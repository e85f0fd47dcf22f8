// Inline, so that kvferry needs xxHash to be built but not to be linked or shipped.
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <kvferry/kvcache/prefix_hash.hpp>

namespace kvferry {

PrefixHash hash_salt(std::string_view salt) noexcept {
  const XXH128_hash_t hash = XXH3_128bits(salt.data(), salt.size());
  return {hash.low64, hash.high64};
}

PrefixHash hash_block(const PrefixHash& before, std::span<const TokenId> tokens) noexcept {
  XXH3_state_t state;
  XXH3_128bits_reset(&state);
  XXH3_128bits_update(&state, &before, sizeof before);
  XXH3_128bits_update(&state, tokens.data(), tokens.size_bytes());
  const XXH128_hash_t hash = XXH3_128bits_digest(&state);
  return {hash.low64, hash.high64};
}

std::vector<PrefixHash> hash_prefix(std::span<const TokenId> tokens, std::uint32_t block_tokens,
                                    std::string_view salt) {
  std::vector<PrefixHash> hashes;
  hashes.reserve(tokens.size() / block_tokens);
  PrefixHash last = hash_salt(salt);
  for (; tokens.size() >= block_tokens; tokens = tokens.subspan(block_tokens))
    hashes.push_back(last = hash_block(last, tokens.first(block_tokens)));
  return hashes;
}

}  // namespace kvferry
