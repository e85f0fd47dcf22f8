#include <cstring>
#include <iostream>
#include <numeric>
#include <string>
#include <vector>

#include <kvferry/actors/engine.hpp>
#include <kvferry/kvcache/block_table.hpp>
#include <kvferry/kvcache/layout.hpp>
#include <kvferry/kvcache/plan.hpp>

using namespace kvferry;

// Layers, KV heads and head size of a small model.
constexpr ModelShape model{"small", 4, 8, 64};

/// Calls visit(place in the rank's region, what stands there) for every vector of the sequence.
template <class Visit>
void for_each_vector(const Layout& layout, std::uint32_t rank, const BlockTable& table, Visit visit) {
  const std::uint32_t block_tokens = layout.spec().block_tokens;
  const HeadRange heads = layout.heads_of(rank);
  for (std::uint32_t layer = 0; layer < model.layers; ++layer)
    for (const Part part : {Part::k, Part::v})
      for (std::uint32_t token = 0; token < table.tokens(); ++token)
        for (std::uint32_t head = heads.first; head < heads.end(); ++head) {
          const BlockId block = table.blocks()[token / block_tokens];
          const auto content = static_cast<unsigned char>(31 * layer + 7 * head + token + static_cast<unsigned>(part));
          visit(layout.address(layer, part, block, token % block_tokens, head - heads.first), content);
        }
}

int main() {
  try {
    // Prefill: two tensor-parallel ranks, blocks of 16 tokens. One pool rules the blocks of both.
    const Layout source =
        packed_layout(model, {.block_tokens = 16, .blocks = 64, .tp_size = 2}, page_order::vllm_nhd).value();
    Engine prefill = Engine::start({.name = "prefill-0"}).value();
    std::vector<Region> shards;
    for (const char* name : {"kv-rank0", "kv-rank1"})
      shards.push_back(prefill.allocate(name, source.spec().values.region_bytes).value());
    BlockPool prefill_pool(source);

    std::vector<TokenId> prompt(100);
    std::iota(prompt.begin(), prompt.end(), 1000);
    BlockTable from = BlockTable::open(prefill_pool, prompt).value();
    for (std::uint32_t rank = 0; rank < 2; ++rank)  // in earnest the model does this
      for_each_vector(source, rank, from, [&](std::uint64_t place, unsigned char content) {
        std::memset(shards[rank].data() + place, content, source.head_bytes());
      });
    if (Status status = from.publish(from.tokens()); !status) throw StatusError(status);

    // What prefill sends to decode by the way of the request: its layout and the sequence's blocks.
    const std::string record = encode_layout(source);
    const std::vector<BlockId> blocks(from.blocks().begin(), from.blocks().end());

    // Decode: one rank, blocks of 32 tokens.
    const Layout layout = packed_layout(model, {.block_tokens = 32, .blocks = 32}, page_order::vllm_nhd).value();
    const Layout theirs = decode_layout(std::as_bytes(std::span(record))).value();
    if (Status status = check_exchange(theirs, layout); !status) throw StatusError(status);

    Engine decode = Engine::start({.name = "decode-0"}).value();
    Region kv = decode.allocate("kv", layout.spec().values.region_bytes).value();
    BlockPool pool(layout);
    BlockTable table = BlockTable::open(pool, prompt).value();

    Peer peer = decode.connect(prefill.address()).value();
    std::size_t slices = 0;
    for (const std::uint32_t rank : source_ranks_of(theirs, layout, 0)) {
      const auto plan = make_plan({.source = {&theirs, blocks, rank},
                                   .destination = {&layout, table.blocks(), 0},
                                   .tokens = {table.shared_tokens(), table.tokens()},  // the rest is here already
                                   .layers = {0, model.layers}})
                            .value();
      slices += plan.size();
      if (Status status = decode.read(peer, kv, "kv-rank" + std::to_string(rank), plan).wait(); !status)
        throw StatusError(status);
    }
    if (Status status = table.publish(table.tokens()); !status) throw StatusError(status);

    bool right = true;
    for_each_vector(layout, 0, table, [&](std::uint64_t place, unsigned char content) {
      for (std::uint64_t i = 0; i < layout.head_bytes(); ++i)
        right &= kv.data()[place + i] == static_cast<std::byte>(content);
    });
    std::cout << table.tokens() << " tokens in " << slices << " slices, " << (right ? "all right" : "wrong") << '\n';
    return right ? 0 : 1;
  } catch (const StatusError& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
