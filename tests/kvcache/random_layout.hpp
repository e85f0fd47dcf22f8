// Random layouts and block tables for the property tests, the same for the same seed everywhere.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <utility>
#include <vector>

#include <kvferry/kvcache/layout.hpp>

#include "bench/random.hpp"

namespace kvferry {

using bench::Random;

inline std::uint32_t pick(Random& random, std::uint32_t first, std::uint32_t last) {
  return first + static_cast<std::uint32_t>(random.below(last - first + 1));
}

template <class T>
T choose(Random& random, std::initializer_list<T> from) {
  return from.begin()[random.below(from.size())];
}

/// Bytes that differ from place to place, so that a byte from a wrong place shows.
inline std::vector<std::uint8_t> random_bytes(Random& random, std::uint64_t size) {
  std::vector<std::uint8_t> bytes(size);
  for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random.next());
  return bytes;
}

/// Strides in any order, now and then with gaps between and an offset before.
inline void place_anywhere(Random& random, const LayoutSpec& spec, std::uint64_t element, Placement& placement) {
  std::vector<Dim> order{Dim::layer, Dim::part, Dim::block, Dim::token, Dim::head};
  bench::shuffle(order, random);
  const bool gaps = random.below(3) == 0;
  std::uint64_t reach = element;
  for (const Dim dim : order) {
    if (gaps && random.below(2) == 0) reach += random.below(24);
    placement.strides.of(dim) = reach;
    const std::uint32_t heads = spec.kv_heads > spec.tp_size ? spec.kv_heads / spec.tp_size : 1;
    const std::uint32_t parts = spec.attention == Attention::mla ? 1 : 2;
    reach *= dim == Dim::layer   ? spec.layers
             : dim == Dim::part  ? parts
             : dim == Dim::block ? spec.blocks
             : dim == Dim::token ? spec.block_tokens
                                 : heads;
  }
  placement.offset = random.below(3) == 0 ? random.below(100) : 0;
  placement.region_bytes = placement.offset + reach + random.below(20);
}

/// Two layouts of one small model that differ in all that may differ.
inline std::pair<Layout, Layout> random_pair(Random& random) {
  LayoutSpec model;
  model.layers = pick(random, 1, 3);
  model.attention = random.below(5) == 0 ? Attention::mla : Attention::mha;
  model.kv_heads = model.attention == Attention::mla ? 1 : choose<std::uint32_t>(random, {1, 2, 4, 6});
  model.head_size = pick(random, 1, 4);
  model.dtype = choose(random, {DType::fp32, DType::bf16, DType::fp8_e4m3, DType::int8});
  if (model.dtype == DType::int8) model.scales = ScaleSpec{.dtype = DType::fp16, .placement = {}};

  const auto make = [&] {
    LayoutSpec spec = model;
    spec.block_tokens = choose<std::uint32_t>(random, {1, 2, 3, 4, 8});
    spec.blocks = pick(random, (24 + spec.block_tokens - 1) / spec.block_tokens, 30);
    do {
      spec.tp_size = pick(random, 1, 12);
    } while (spec.kv_heads % spec.tp_size != 0 && spec.tp_size % spec.kv_heads != 0);
    place_anywhere(random, spec, std::uint64_t{spec.head_size} * dtype_bytes(spec.dtype), spec.values);
    if (spec.scales) place_anywhere(random, spec, dtype_bytes(spec.scales->dtype), spec.scales->placement);
    return Layout::make(spec).value();
  };
  const Layout source = make();
  return {source, make()};
}

/// A block table for `tokens` tokens: shuffled, in order, or backwards.
inline std::vector<BlockId> random_table(Random& random, const Layout& layout, std::uint32_t tokens) {
  std::vector<BlockId> blocks(layout.spec().blocks);
  for (BlockId id = 0; id < blocks.size(); ++id) blocks[id] = id;
  const std::uint64_t kind = random.below(3);
  if (kind == 0) bench::shuffle(blocks, random);
  if (kind == 1) std::ranges::reverse(blocks);
  blocks.resize((tokens + layout.spec().block_tokens - 1) / layout.spec().block_tokens);
  return blocks;
}

}  // namespace kvferry
