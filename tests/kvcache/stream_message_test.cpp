#include <random>

#include <gtest/gtest.h>

#include <kvferry/kvcache/stream_message.hpp>

namespace kvferry {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

StreamTicket some_ticket() {
  StreamTicket ticket;
  ticket.form = StreamForm::pull;
  ticket.stream = 0xfedcba9876543210;
  ticket.incarnation = 77;
  ticket.lease = "lease-1";
  ticket.layout = std::string("\0layout\xff", 8);
  ticket.rank = 3;
  ticket.blocks = {0, 5, UINT32_MAX, 0x01020304};
  ticket.tokens = {16, 61};
  ticket.payload = Payload::scales;
  ticket.checksums = true;
  return ticket;
}

TEST(StreamTicket, ArrivesAsItWasSent) {
  const StreamTicket ticket = some_ticket();
  const StreamTicket arrived = decode_ticket(bytes_of(encode(ticket))).value();
  EXPECT_EQ(arrived.form, ticket.form);
  EXPECT_EQ(arrived.stream, ticket.stream);
  EXPECT_EQ(arrived.incarnation, ticket.incarnation);
  EXPECT_EQ(arrived.lease, ticket.lease);
  EXPECT_EQ(arrived.layout, ticket.layout);
  EXPECT_EQ(arrived.rank, ticket.rank);
  EXPECT_EQ(arrived.blocks, ticket.blocks);
  EXPECT_EQ(arrived.tokens.first, 16u);
  EXPECT_EQ(arrived.tokens.end, 61u);
  EXPECT_EQ(arrived.payload, ticket.payload);
  EXPECT_TRUE(arrived.checksums);
}

TEST(StreamMessage, ArrivesAsItWasSent) {
  const auto through = [](StreamBody body) {
    const StreamMessage arrived = decode_stream_message(bytes_of(encode(StreamMessage{42, std::move(body)}))).value();
    EXPECT_EQ(arrived.stream, 42u);
    return arrived.body;
  };
  const auto open = std::get<OpenStream>(through(OpenStream{{2, 6}, 32}));
  EXPECT_EQ(open.heads, (HeadRange{2, 6}));
  EXPECT_EQ(open.unit_tokens, 32u);
  const auto ready = std::get<LayerReady>(through(LayerReady{9, {1, UINT64_MAX, 0x0102030405060708}}));
  EXPECT_EQ(ready.layer, 9u);
  EXPECT_EQ(ready.checksums, (std::vector<std::uint64_t>{1, UINT64_MAX, 0x0102030405060708}));
  EXPECT_EQ(std::get<LayerAgain>(through(LayerAgain{4})).layer, 4u);
  EXPECT_TRUE(std::holds_alternative<StreamDone>(through(StreamDone{})));
  const auto failed = std::get<StreamFailed>(through(StreamFailed{9, "why"}));
  EXPECT_EQ(failed.code, 9u);
  EXPECT_EQ(failed.text, "why");
}

TEST(StreamMessage, TheLargestFitsOneMessageOfAnEngine) {
  const LayerReady ready{UINT32_MAX, std::vector<std::uint64_t>(max_layer_checksums, UINT64_MAX)};
  EXPECT_LE(encode(StreamMessage{UINT64_MAX, ready}).size(), 64u * 1024);
  StreamTicket ticket = some_ticket();
  ticket.blocks.assign(max_ticket_blocks, UINT32_MAX);
  ticket.layout.assign(max_layout_bytes, 'l');
  EXPECT_LE(encode(ticket).size(), max_ticket_bytes);
  EXPECT_TRUE(decode_ticket(bytes_of(encode(ticket))));
}

TEST(StreamMessage, RefusesWhatIsBeyondItsLimits) {
  const LayerReady ready{0, std::vector<std::uint64_t>(max_layer_checksums + 1)};
  EXPECT_EQ(decode_stream_message(bytes_of(encode(StreamMessage{1, ready}))).status().code(), Errc::malformed);
  StreamTicket ticket = some_ticket();
  ticket.blocks.assign(max_ticket_blocks + 1, 0);
  EXPECT_EQ(decode_ticket(bytes_of(encode(ticket))).status().code(), Errc::malformed);
  EXPECT_EQ(decode_ticket(bytes_of(std::string(max_ticket_bytes + 1, 'x'))).status().code(), Errc::malformed);
}

TEST(StreamMessage, RefusesAnotherVersion) {
  std::string bytes = encode(StreamMessage{1, StreamDone{}});
  const std::size_t version = bytes.find('v') + 1;
  bytes[version] = 2;
  EXPECT_EQ(decode_stream_message(bytes_of(bytes)).status().code(), Errc::version_mismatch);
}

TEST(StreamMessage, SurvivesAnyBytes) {
  std::mt19937 random(3);
  const std::vector<std::string> good{encode(StreamMessage{7, LayerReady{1, {2, 3}}}), encode(some_ticket())};
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = good[random() % good.size()];
    for (unsigned flips = 1 + random() % 4; flips > 0; --flips)
      bytes[random() % bytes.size()] = static_cast<char>(random());
    if (random() % 4 == 0) bytes.resize(random() % (bytes.size() + 1));
    const auto message = decode_stream_message(bytes_of(bytes));
    const auto ticket = decode_ticket(bytes_of(bytes));
    EXPECT_TRUE(message || !message.status().text().empty());
    EXPECT_TRUE(ticket || !ticket.status().text().empty());
  }
  EXPECT_EQ(decode_stream_message({}).status().code(), Errc::malformed);
}

}  // namespace
}  // namespace kvferry
