// Layer streams between whole engines, in both forms, over both transports, with everything that can go wrong.
#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include <kvferry/kvcache/block_table.hpp>
#include <kvferry/kvcache/layer_stream.hpp>
#include <kvferry/kvcache/stream_message.hpp>
#include <kvferry/runtime/one_sided.hpp>

#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

constexpr ModelShape model{"small", 6, 4, 32};
constexpr std::uint32_t tokens = 150;

/// One engine with a KV cache, a pool and its streams.
struct Node {
  Node(const std::string& name, const std::string& transport, const Layout& made)
      : layout(made),
        engine(start(config_of(name, transport), {make_fault_transport(make_transport(transport), plan, transport)})) {
    kv =
        engine
            .allocate("kv", layout.spec().values.region_bytes, {.access = Access::none, .leasable = Access::read_write})
            .value();
    hub.emplace(engine);
  }

  /// Blocks for the sequence; the pool gets them back when the last copy is gone.
  std::shared_ptr<BlockTable> open_table() {
    const std::vector<TokenId> prompt(tokens, 1);
    return std::make_shared<BlockTable>(BlockTable::open(pool, prompt).value());
  }
  StreamSide side(const std::shared_ptr<BlockTable>& table, std::uint32_t rank = 0) const {
    return {kv, layout, {table->blocks().begin(), table->blocks().end()}, rank, table};
  }
  bool all_free() const { return pool.counts().used == 0; }

  std::shared_ptr<FaultPlan> plan = std::make_shared<FaultPlan>();
  Layout layout;
  BlockPool pool{layout};
  Engine engine;
  Region kv;
  std::optional<StreamHub> hub;
};

/// Calls visit(place in the region, what stands there) for every vector of the rank.
template <class Visit>
void for_each_vector(const Layout& layout, std::uint32_t rank, std::span<const BlockId> blocks, Visit visit) {
  const HeadRange heads = layout.heads_of(rank);
  const std::uint32_t block_tokens = layout.spec().block_tokens;
  for (std::uint32_t layer = 0; layer < layout.spec().layers; ++layer)
    for (const Part part : {Part::k, Part::v})
      for (std::uint32_t token = 0; token < tokens; ++token)
        for (std::uint32_t head = heads.first; head < heads.end(); ++head)
          visit(layout.address(layer, part, blocks[token / block_tokens], token % block_tokens, head - heads.first),
                static_cast<unsigned char>(1 + 37 * layer + 11 * head + token + 101 * static_cast<unsigned>(part)));
}

void compute(const Node& node, const BlockTable& table, std::uint32_t rank = 0) {
  const OneSidedAccess unordered;
  for_each_vector(node.layout, rank, table.blocks(), [&](std::uint64_t at, unsigned char content) {
    std::memset(node.kv.data() + at, content, node.layout.head_bytes());
  });
}

std::size_t wrong_vectors(const Node& node, const BlockTable& table) {
  const OneSidedAccess unordered;
  std::size_t wrong = 0;
  for_each_vector(node.layout, 0, table.blocks(), [&](std::uint64_t at, unsigned char content) {
    const std::vector<unsigned char> expected(node.layout.head_bytes(), content);
    wrong += std::memcmp(node.kv.data() + at, expected.data(), expected.size()) != 0;
  });
  return wrong;
}

class StreamTest : public testing::TestWithParam<std::tuple<const char*, const char*>> {
 protected:
  bool push_form() const { return std::string_view(std::get<1>(GetParam())) == "push"; }

  /// Both ends of one stream over fresh blocks.
  struct Ends {
    std::shared_ptr<BlockTable> from;
    std::shared_ptr<BlockTable> to;
    std::optional<LayerProducer> producer;
    std::optional<LayerConsumer> consumer;

    void forget_tables() { from.reset(), to.reset(); }
  };

  StreamOptions options(bool checksums = false, Duration limit = 20s) const {
    StreamOptions options;
    options.tokens = {0, tokens};
    options.checksums = checksums;
    options.limit = limit;
    return options;
  }

  Ends begin(const StreamOptions& terms) {
    Ends ends{prefill.open_table(), decode.open_table(), {}, {}};
    compute(prefill, *ends.from);
    StreamOptions joining;
    joining.limit = terms.limit;
    if (push_form()) {
      ends.consumer = decode.hub->offer_sink(to_prefill, decode.side(ends.to), terms).value();
      ends.producer =
          prefill.hub->write_to(to_decode, ends.consumer->ticket(), prefill.side(ends.from), joining).value();
    } else {
      ends.producer = prefill.hub->offer_source(to_decode, prefill.side(ends.from), terms).value();
      ends.consumer = decode.hub->read_from(to_prefill, ends.producer->ticket(), decode.side(ends.to), joining).value();
    }
    return ends;
  }

  void expect_all_free() {
    EXPECT_TRUE(eventually(slow(10s), [&] { return prefill.all_free() && decode.all_free(); }))
        << prefill.pool.counts().used << " blocks of the producer and " << decode.pool.counts().used
        << " of the consumer are still used";
  }

  Node prefill{"prefill", std::get<0>(GetParam()),
               packed_layout(model, {.block_tokens = 16, .blocks = 40}, page_order::vllm_nhd).value()};
  Node decode{"decode", std::get<0>(GetParam()),
              packed_layout(model, {.block_tokens = 32, .blocks = 20}, page_order::flashinfer_hnd).value()};
  Peer to_decode = prefill.engine.connect(decode.engine.address()).value();
  Peer to_prefill = decode.engine.connect(prefill.engine.address()).value();
};

void push_all(LayerProducer& producer) {
  for (std::uint32_t layer = 0; layer < model.layers; ++layer) EXPECT_TRUE(producer.push(layer));
}

void push_all_but_first(LayerProducer& producer) {
  for (std::uint32_t layer = 1; layer < model.layers; ++layer) static_cast<void>(producer.push(layer));
}

TEST_P(StreamTest, CarriesEveryLayerInAnyOrder) {
  for (const bool checksums : {false, true}) {
    Ends ends = begin(options(checksums));
    for (const std::uint32_t layer : {3u, 0u, 5u, 4u, 1u, 2u}) EXPECT_TRUE(ends.producer->push(layer));
    for (const std::uint32_t layer : {5u, 4u, 3u, 2u, 1u, 0u}) {
      EXPECT_TRUE(ends.consumer->wait_layer(layer, slow(10s)));
      EXPECT_TRUE(ends.consumer->arrived(layer));
    }
    EXPECT_TRUE(ends.consumer->wait());
    EXPECT_TRUE(ends.producer->wait());
    EXPECT_EQ(wrong_vectors(decode, *ends.to), 0u);
    ends.forget_tables();
    expect_all_free();
  }
}

TEST_P(StreamTest, ALayerIsThereBeforeTheNextIsComputed) {
  Ends ends = begin(options(true));
  EXPECT_TRUE(ends.producer->push(2));
  EXPECT_TRUE(ends.consumer->wait_layer(2, slow(10s)));
  EXPECT_EQ(ends.consumer->wait_layer(0, 20ms).code(), Errc::timed_out);
  EXPECT_FALSE(ends.consumer->arrived(0));
  EXPECT_FALSE(ends.consumer->ended());
  EXPECT_EQ(ends.producer->push(2).code(), Errc::invalid_argument) << "pushed twice";
  EXPECT_EQ(ends.producer->push(model.layers).code(), Errc::invalid_argument);
  EXPECT_EQ(ends.consumer->wait_layer(model.layers, 1s).code(), Errc::invalid_argument);
}

TEST_P(StreamTest, BlocksOfAStreamThatSucceededAreTheProgramsToKeep) {
  Ends ends = begin(options());
  push_all(*ends.producer);
  ASSERT_TRUE(ends.consumer->wait());
  ASSERT_TRUE(ends.producer->wait());
  EXPECT_GT(decode.pool.counts().used, 0u);
  EXPECT_EQ(ends.to.use_count(), 1) << "the stream must let go of them at its end";
  EXPECT_EQ(ends.from.use_count(), 1);
}

TEST_P(StreamTest, AnAbortEndsBothSidesWithOneError) {
  for (const bool by_producer : {true, false}) {
    Ends ends = begin(options());
    EXPECT_TRUE(ends.producer->push(0));
    EXPECT_TRUE(ends.consumer->wait_layer(0, slow(10s)));
    ends.forget_tables();
    if (by_producer)
      ends.producer->abort("out of ideas");
    else
      ends.consumer->abort("out of ideas");
    for (const Status& status : {ends.producer->wait(), ends.consumer->wait()}) {
      EXPECT_EQ(status.code(), Errc::cancelled);
      EXPECT_NE(status.text().find("out of ideas"), std::string_view::npos) << status.text();
    }
    EXPECT_EQ(ends.producer->push(1).code(), Errc::cancelled);
    EXPECT_EQ(ends.consumer->wait_layer(0, 1s).code(), Errc::cancelled) << "what has arrived is gone too";
    EXPECT_TRUE(prefill.all_free());
    EXPECT_TRUE(decode.all_free());
  }
}

TEST_P(StreamTest, AtItsLimitItEndsAndFreesEverything) {
  Ends ends = begin(options(false, 300ms));
  ends.forget_tables();
  EXPECT_TRUE(ends.producer->push(0));
  const TimePoint begun = Clock::now();
  const Status here = ends.consumer->wait();
  const Status there = ends.producer->wait();
  EXPECT_LT(Clock::now() - begun, slow(3s));
  EXPECT_TRUE(here == Errc::timed_out || there == Errc::timed_out) << here.to_string() << ", " << there.to_string();
  EXPECT_FALSE(here);
  EXPECT_FALSE(there);
  expect_all_free();
}

TEST_P(StreamTest, TheEndOfThePeersEngineEndsIt) {
  Ends ends = begin(options());
  EXPECT_TRUE(ends.producer->push(0));
  EXPECT_TRUE(ends.consumer->wait_layer(0, slow(10s)));
  ends.to.reset();
  ends.producer.reset();
  prefill.hub.reset();
  { const Engine gone = std::move(prefill.engine); }
  EXPECT_FALSE(ends.consumer->wait());
  EXPECT_TRUE(decode.all_free());
}

TEST_P(StreamTest, ATransferThatFailsEndsIt) {
  Ends ends = begin(options(false, slow(1s)));
  EXPECT_TRUE(ends.producer->push(0));
  EXPECT_TRUE(ends.consumer->wait_layer(0, slow(10s)));
  ends.forget_tables();
  (push_form() ? prefill : decode).plan->fail_items = 1u << 30;
  push_all_but_first(*ends.producer);
  EXPECT_FALSE(ends.producer->wait());
  EXPECT_FALSE(ends.consumer->wait());
  (push_form() ? prefill : decode).plan->fail_items = 0;
  expect_all_free();
}

TEST_P(StreamTest, OneCorruptedBlockIsFetchedAgain) {
  Ends ends = begin(options(true));
  (push_form() ? prefill.plan->corrupt_writes : decode.plan->corrupt_items) = 1;
  push_all(*ends.producer);
  EXPECT_TRUE(ends.consumer->wait());
  EXPECT_TRUE(ends.producer->wait());
  EXPECT_EQ((push_form() ? prefill.plan->corrupt_writes : decode.plan->corrupt_items).load(), 0u);
  EXPECT_EQ(wrong_vectors(decode, *ends.to), 0u);
}

TEST_P(StreamTest, TwiceCorruptedNamesLayerAndBlock) {
  Ends ends = begin(options(true));
  const std::vector<BlockId> blocks(ends.to->blocks().begin(), ends.to->blocks().end());
  EXPECT_TRUE(ends.producer->push(0));
  EXPECT_TRUE(ends.consumer->wait_layer(0, slow(10s)));
  (push_form() ? prefill.plan->corrupt_writes : decode.plan->corrupt_items) = 1u << 30;
  ends.forget_tables();
  EXPECT_TRUE(ends.producer->push(4));
  const Status status = ends.consumer->wait();
  EXPECT_EQ(status.code(), Errc::corrupted);
  EXPECT_NE(status.text().find("layer 4, block "), std::string_view::npos) << status.text();
  const bool names_one = std::any_of(blocks.begin(), blocks.end(), [&](BlockId block) {
    return status.text().find("block " + std::to_string(block) + " ") != std::string_view::npos;
  });
  EXPECT_TRUE(names_one) << status.text();
  EXPECT_EQ(ends.producer->wait().code(), Errc::corrupted);
  expect_all_free();
}

TEST_P(StreamTest, WithoutChecksumsNobodyLooks) {
  Ends ends = begin(options(false));
  (push_form() ? prefill.plan->corrupt_writes : decode.plan->corrupt_items) = 1;
  push_all(*ends.producer);
  EXPECT_TRUE(ends.consumer->wait());
  EXPECT_EQ(wrong_vectors(decode, *ends.to), 1u) << "the fault that the other tests rely on";
}

// Either side gives up at any moment, in any way: before, during and after the transfer. Then the blocks are free on
// both sides, and nothing lands in them any more.
TEST_P(StreamTest, AbortsAtAnyMomentLeakNoBlock) {
  std::minstd_rand random(static_cast<unsigned>(push_form()) + 5);
  for (int round = 0; round < 60; ++round) {
    (push_form() ? prefill : decode).plan->delay_us = static_cast<std::int64_t>(random() % 3) * 500;
    Ends ends = begin(options(random() % 2 == 0));
    ends.forget_tables();
    std::thread computing([&, pause = random() % 400] {
      for (std::uint32_t layer = 0; layer < model.layers; ++layer) {
        std::this_thread::sleep_for(std::chrono::microseconds(pause));
        if (!ends.producer->push(layer)) return;
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 4000));
    switch (random() % 3) {
      case 0:
        ends.producer->abort("test");
        break;
      case 1:
        ends.consumer->abort("test");
        break;
      default:
        ends.consumer.reset();
    }
    computing.join();
    const Status produced = ends.producer->wait();
    if (ends.consumer) {
      const Status consumed = ends.consumer->wait();
      // The consumer decides: what it has complete is complete, whatever the producer wanted by then.
      EXPECT_TRUE(consumed || !produced) << produced.to_string();
    }
    expect_all_free();
    const Snapshot after(decode.kv.bytes());
    // Any write that is still on its way would show.
    {
      const OneSidedAccess unordered;
      std::memset(prefill.kv.data(), round, prefill.kv.size());
    }
    std::this_thread::sleep_for(3ms);
    EXPECT_EQ(after.changed_bytes(), 0u) << "round " << round;
  }
}

TEST_P(StreamTest, ManyAtOnceEndOnTheirOwn) {
  std::vector<Ends> all;
  for (int i = 0; i < 3; ++i) all.push_back(begin(options(true)));
  all[1].consumer->abort("only this one");
  for (Ends& ends : all) static_cast<void>(ends.producer->push(0));
  for (const std::size_t i : {0u, 2u}) {
    for (std::uint32_t layer = 1; layer < model.layers; ++layer) EXPECT_TRUE(all[i].producer->push(layer));
    EXPECT_TRUE(all[i].consumer->wait());
    EXPECT_TRUE(all[i].producer->wait());
    EXPECT_EQ(wrong_vectors(decode, *all[i].to), 0u);
  }
  EXPECT_FALSE(all[1].producer->wait());
  all.clear();
  expect_all_free();
}

TEST_P(StreamTest, ItsHubEndsItWhenItGoes) {
  Ends ends = begin(options());
  ends.forget_tables();
  EXPECT_TRUE(ends.producer->push(0));
  decode.hub.reset();
  EXPECT_EQ(ends.consumer->wait().code(), Errc::shutting_down);
  EXPECT_FALSE(ends.producer->wait());
  expect_all_free();
}

TEST_P(StreamTest, RefusesTicketsThatDoNotFit) {
  Ends ends = begin(options());
  const std::string ticket = push_form() ? ends.consumer->ticket() : ends.producer->ticket();
  const auto table = prefill.open_table();
  const auto join = [&](const std::string& bytes) {
    return push_form() ? prefill.hub->write_to(to_decode, bytes, prefill.side(table)).status().code()
                       : decode.hub->read_from(to_prefill, bytes, decode.side(table)).status().code();
  };
  EXPECT_EQ(join("noise"), Errc::malformed);
  EXPECT_EQ(push_form() ? prefill.hub->read_from(to_decode, ticket, prefill.side(table)).status().code()
                        : decode.hub->write_to(to_prefill, ticket, decode.side(table)).status().code(),
            Errc::invalid_argument)
      << "the other form";
  StreamTicket foreign = decode_ticket(std::as_bytes(std::span(ticket))).value();
  ++foreign.incarnation;
  EXPECT_EQ(join(encode(foreign)), Errc::stale_peer);
  StreamTicket guessed = decode_ticket(std::as_bytes(std::span(ticket))).value();
  guessed.lease += "x";
  EXPECT_EQ(join(encode(guessed)), Errc::unknown_region);
}

INSTANTIATE_TEST_SUITE_P(Transports, StreamTest,
                         testing::Combine(testing::Values("tcp", "shm"), testing::Values("push", "pull")),
                         [](const auto& info) {
                           return std::string(std::get<0>(info.param)) + "_" + std::get<1>(info.param);
                         });

// Two prefill ranks fill one decode rank: a stream for each.
TEST(StreamRanks, EachSourceRankHasAStream) {
  Node prefill0{"prefill-0", "shm",
                packed_layout(model, {.block_tokens = 16, .blocks = 40, .tp_size = 2}, page_order::vllm_nhd).value()};
  Node prefill1{"prefill-1", "shm", prefill0.layout};
  Node decode{"decode", "shm", packed_layout(model, {.block_tokens = 32, .blocks = 20}, page_order::vllm_hnd).value()};
  const auto to = decode.open_table();
  std::vector<std::shared_ptr<BlockTable>> from;
  std::vector<LayerProducer> producers;
  std::vector<LayerConsumer> consumers;
  StreamOptions options;
  options.tokens = {0, tokens};
  options.checksums = true;
  for (std::uint32_t rank = 0; rank < 2; ++rank) {
    Node& prefill = rank == 0 ? prefill0 : prefill1;
    const Peer to_decode = prefill.engine.connect(decode.engine.address()).value();
    const Peer to_prefill = decode.engine.connect(prefill.engine.address()).value();
    from.push_back(prefill.open_table());
    compute(prefill, *from.back(), rank);
    consumers.push_back(decode.hub->offer_sink(to_prefill, decode.side(to), options).value());
    producers.push_back(
        prefill.hub->write_to(to_decode, consumers.back().ticket(), prefill.side(from.back(), rank)).value());
  }
  for (LayerProducer& producer : producers) push_all(producer);
  for (LayerConsumer& consumer : consumers) EXPECT_TRUE(consumer.wait());
  EXPECT_EQ(wrong_vectors(decode, *to), 0u);
}

}  // namespace
}  // namespace kvferry::test
