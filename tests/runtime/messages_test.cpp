#include <algorithm>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include <gtest/gtest.h>
#include <msgpack.hpp>

#include <kvferry/runtime/messages.hpp>

namespace kvferry {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

RemoteRegion region(std::uint32_t slot) {
  RemoteRegion made;
  made.key = {slot, 0xffffffff};
  made.name = std::string("kv\0\xff", 4) + std::to_string(slot);
  made.size = ~std::uint64_t{0};
  made.kind = MemoryKind::cuda;
  made.access = Access::read_write;
  made.descriptors = {{"tcp", ""}, {"shm", std::string("\0\1\2", 3)}};
  return made;
}

HelloMessage hello() { return {protocol_version, "decode-0", 0x8000000000000001u, "boot-id"}; }

WelcomeMessage welcome() {
  WelcomeMessage made;
  made.name = "prefill-0";
  made.incarnation = 3;
  made.host_id = "boot-id";
  made.data_host = "10.1.2.3";
  for (std::size_t i = 0; i < made.token.size(); ++i) made.token[i] = static_cast<std::byte>(0xf8 + i);
  made.ports = {{"shm", "an address"}, {"tcp", std::string("\0\xff", 2)}};
  made.regions = {region(0), region(16383)};
  return made;
}

std::vector<ControlMessage> one_of_each() {
  return {{1, hello()},
          {2, welcome()},
          {3, RefusedMessage{7, 21, "a text"}},
          {4, PingMessage{~std::uint64_t{0}}},
          {5, PongMessage{9, true}},
          {6, FindRegionMessage{10, "kv"}},
          {7, RegionMessage{true, region(5)}},
          {~std::uint64_t{0}, ByeMessage{11}},
          {0, WelcomeMessage{}},
          {0, RegionMessage{}}};
}

// Encoding writes every field, so equal bytes mean equal messages.
TEST(Messages, EveryMessageSurvivesTheTrip) {
  for (const ControlMessage& message : one_of_each()) {
    const std::string bytes = encode(message);
    const auto decoded = decode(bytes_of(bytes));
    ASSERT_TRUE(decoded) << decoded.status().to_string();
    EXPECT_EQ(decoded->id, message.id);
    EXPECT_EQ(decoded->body.index(), message.body.index());
    EXPECT_EQ(encode(*decoded), bytes);
  }
}

TEST(Messages, FieldsArriveWhereTheyBelong) {
  const auto decoded = decode(bytes_of(encode({42, welcome()})));
  ASSERT_TRUE(decoded);
  const auto& got = std::get<WelcomeMessage>(decoded->body);
  EXPECT_EQ(got.protocol, protocol_version);
  EXPECT_EQ(got.name, "prefill-0");
  EXPECT_EQ(got.incarnation, 3u);
  EXPECT_EQ(got.host_id, "boot-id");
  EXPECT_EQ(got.data_host, "10.1.2.3");
  EXPECT_EQ(got.token, welcome().token);
  ASSERT_EQ(got.ports.size(), 2u);
  EXPECT_EQ(got.ports[1].transport, "tcp");
  EXPECT_EQ(got.ports[1].address, std::string("\0\xff", 2));
  ASSERT_EQ(got.regions.size(), 2u);
  EXPECT_EQ(got.regions[1].key, (RegionKey{16383, 0xffffffff}));
  EXPECT_EQ(got.regions[1].name, std::string("kv\0\xff", 4) + "16383");
  EXPECT_EQ(got.regions[1].size, ~std::uint64_t{0});
  EXPECT_EQ(got.regions[1].kind, MemoryKind::cuda);
  EXPECT_EQ(got.regions[1].access, Access::read_write);
  EXPECT_EQ(got.regions[1].descriptors, region(0).descriptors);

  const auto pong = decode(bytes_of(encode({1, PongMessage{9, true}})));
  ASSERT_TRUE(pong);
  EXPECT_EQ(std::get<PongMessage>(pong->body).incarnation, 9u);
  EXPECT_TRUE(std::get<PongMessage>(pong->body).known);
}

TEST(Messages, EveryTruncationIsRefused) {
  for (const ControlMessage& message : one_of_each()) {
    const std::string whole = encode(message);
    for (std::size_t length = 0; length < whole.size(); ++length) {
      // A copy of just these bytes, so that a sanitizer sees a read beyond them.
      const std::vector<char> part(whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(length));
      const auto decoded = decode(std::as_bytes(std::span(part)));
      ASSERT_FALSE(decoded) << length << " of " << whole.size();
      ASSERT_TRUE(decoded.status() == Errc::malformed);
      EXPECT_NE(decoded.status().text().find(std::to_string(length) + " bytes"), std::string_view::npos);
    }
  }
}

TEST(Messages, BytesAfterTheMessageAreRefused) {
  const auto decoded = decode(bytes_of(encode({1, hello()}) + '\0'));
  ASSERT_FALSE(decoded);
  EXPECT_TRUE(decoded.status() == Errc::malformed);
  EXPECT_NE(decoded.status().text().find("bytes follow the message"), std::string_view::npos);
}

// ---------------------------------------------------------------- messages written by hand

using Packer = msgpack::packer<msgpack::sbuffer>;
using Put = std::function<void(Packer&)>;

Put number(std::uint64_t value) {
  return [=](Packer& packer) { packer.pack(value); };
}
Put text(std::string value) {
  return [=](Packer& packer) { packer.pack(value); };
}
Put bin(std::string value) {
  return [=](Packer& packer) {
    packer.pack_bin(static_cast<std::uint32_t>(value.size())).pack_bin_body(value.data(), value.size());
  };
}
Put nil() {
  return [](Packer& packer) { packer.pack_nil(); };
}

using Fields = std::vector<std::pair<std::string, Put>>;

Fields hello_fields() {
  return {{"v", number(schema_version)}, {"t", text("hello")}, {"id", number(4)}, {"proto", number(1)},
          {"name", bin("decode-0")},     {"inc", number(5)},   {"host", bin("h")}};
}

std::string pack(const Fields& fields) {
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  packer.pack_map(static_cast<std::uint32_t>(fields.size()));
  for (const auto& [key, put] : fields) {
    packer.pack(key);
    put(packer);
  }
  return {buffer.data(), buffer.size()};
}

Status outcome(const Fields& fields) { return decode(bytes_of(pack(fields))).status(); }

Fields with(Fields fields, const std::string& key, Put put) {
  for (auto& field : fields)
    if (field.first == key) field.second = std::move(put);
  return fields;
}
Fields without(Fields fields, const std::string& key) {
  std::erase_if(fields, [&](const auto& field) { return field.first == key; });
  return fields;
}

void expect_malformed(const Status& status, std::string_view part) {
  EXPECT_TRUE(status == Errc::malformed) << status.to_string();
  EXPECT_NE(status.text().find(part), std::string_view::npos) << status.text() << "\nshould name: " << part;
}

TEST(MessagesByHand, TheFieldsAreThoseOfTheFormat) {
  const auto decoded = decode(bytes_of(pack(hello_fields())));
  ASSERT_TRUE(decoded) << decoded.status().to_string();
  EXPECT_EQ(decoded->id, 4u);
  EXPECT_EQ(std::get<HelloMessage>(decoded->body).name, "decode-0");
}

TEST(MessagesByHand, UnknownKeysAndAnyOrderAreAccepted) {
  Fields fields = hello_fields();
  fields.insert(fields.begin(), {"newer", [](Packer& p) { p.pack(std::vector<int>{1, 2, 3}); }});
  fields.push_back({"kv-layout", nil()});
  std::reverse(fields.begin(), fields.end());
  EXPECT_TRUE(outcome(fields).is_ok()) << outcome(fields).to_string();
}

TEST(MessagesByHand, KeysThatAreNoTextAreIgnored) {
  msgpack::sbuffer buffer;
  Packer packer(buffer);
  packer.pack_map(static_cast<std::uint32_t>(hello_fields().size() + 2));
  packer.pack(17).pack(18);
  packer.pack_nil().pack_nil();
  const std::string rest = pack(hello_fields()).substr(1);
  const std::string bytes = std::string(buffer.data(), buffer.size()) + rest;
  EXPECT_TRUE(decode(bytes_of(bytes)));
}

TEST(MessagesByHand, EveryMissingFieldIsNamed) {
  for (const auto& [key, put] : hello_fields())
    expect_malformed(outcome(without(hello_fields(), key)), "field '" + key + "' is missing");
}

TEST(MessagesByHand, EveryWrongTypeIsNamed) {
  for (const char* key : {"id", "proto", "inc"}) {
    expect_malformed(outcome(with(hello_fields(), key, text("5"))),
                     std::string("field '") + key + "': expected a number");
    expect_malformed(outcome(with(hello_fields(), key, [](Packer& p) { p.pack(-1); })),
                     std::string("field '") + key + "': expected a number >= 0");
    expect_malformed(outcome(with(hello_fields(), key, [](Packer& p) { p.pack(1.5); })),
                     std::string("field '") + key + "': expected a number");
    expect_malformed(outcome(with(hello_fields(), key, nil())), std::string("field '") + key + "': expected a number");
  }
  for (const char* key : {"name", "host"}) {
    expect_malformed(outcome(with(hello_fields(), key, number(5))), std::string("field '") + key + "': expected bytes");
    expect_malformed(outcome(with(hello_fields(), key, text("x"))), std::string("field '") + key + "': expected bytes");
  }
  expect_malformed(outcome(with(hello_fields(), "t", number(1))), "'t'");
  expect_malformed(outcome(with(hello_fields(), "v", text("1"))), "'v'");
}

TEST(MessagesByHand, NumbersBeyondTheirFieldAreNamed) {
  const std::uint64_t beyond = std::uint64_t{1} << 32;
  expect_malformed(outcome(with(hello_fields(), "proto", number(beyond))),
                   "field 'proto': 4294967296 is above 4294967295");
  EXPECT_TRUE(outcome(with(hello_fields(), "proto", number(beyond - 1))).is_ok())
      << "another protocol decodes: the target refuses it by name";
}

TEST(MessagesByHand, AnUnknownTypeIsNamed) {
  expect_malformed(outcome(with(hello_fields(), "t", text("hallo"))), "unknown message type 'hallo'");
  expect_malformed(outcome(with(hello_fields(), "t", text(std::string(4000, 'x')))), "'" + std::string(32, 'x') + "'");
  expect_malformed(outcome(with(hello_fields(), "t", text(""))), "unknown message type ''");
}

TEST(MessagesByHand, AnotherSchemaVersionIsNamedBeforeAnythingElse) {
  for (const std::uint64_t version : {std::uint64_t{0}, std::uint64_t{2}, ~std::uint64_t{0}}) {
    const Status status = outcome({{"v", number(version)}, {"whatever", nil()}});
    EXPECT_TRUE(status == Errc::version_mismatch) << status.to_string();
    EXPECT_NE(status.text().find("version " + std::to_string(version)), std::string_view::npos) << status.text();
    EXPECT_NE(status.text().find("reads 1"), std::string_view::npos) << status.text();
  }
}

TEST(MessagesByHand, OnlyAMapIsAMessage) {
  for (const Put& put : {number(1), text("hello"), nil(), Put([](Packer& p) { p.pack_array(0); })}) {
    msgpack::sbuffer buffer;
    Packer packer(buffer);
    put(packer);
    expect_malformed(decode(bytes_of({buffer.data(), buffer.size()})).status(), "expected a map");
  }
}

Fields welcome_fields() {
  return {{"v", number(schema_version)},
          {"t", text("welcome")},
          {"id", number(4)},
          {"proto", number(1)},
          {"name", bin("n")},
          {"inc", number(5)},
          {"host", bin("h")},
          {"data_host", bin("")},
          {"token", bin(std::string(16, 't'))},
          {"ports", [](Packer& p) { p.pack_array(0); }},
          {"regions", [](Packer& p) { p.pack_array(0); }}};
}

Put array_of(std::vector<Fields> maps) {
  return [=](Packer& packer) {
    packer.pack_array(static_cast<std::uint32_t>(maps.size()));
    for (const Fields& map : maps) {
      const std::string bytes = pack(map);
      packer.pack_bin_body(bytes.data(), bytes.size());
    }
  };
}

TEST(MessagesByHand, ErrorsInsideArraysAreNamedWithTheirPath) {
  ASSERT_TRUE(outcome(welcome_fields()).is_ok()) << outcome(welcome_fields()).to_string();
  const Fields port{{"transport", bin("tcp")}, {"address", bin("a")}};
  EXPECT_TRUE(outcome(with(welcome_fields(), "ports", array_of({port, port}))).is_ok());
  expect_malformed(outcome(with(welcome_fields(), "ports", array_of({port, without(port, "address")}))),
                   "field 'ports': field 'address' is missing");
  expect_malformed(outcome(with(welcome_fields(), "ports", number(3))), "field 'ports': expected an array");
  expect_malformed(outcome(with(welcome_fields(), "ports", [](Packer& p) { p.pack(std::vector<int>{1}); })),
                   "field 'ports': expected a map");
  for (const std::size_t size : {0u, 15u, 17u})
    expect_malformed(outcome(with(welcome_fields(), "token", bin(std::string(size, 't')))),
                     "field 'token': expected 16 bytes");
}

TEST(MessagesByHand, EnumsHaveOnlyTheirValues) {
  const Fields region{{"slot", number(1)}, {"gen", number(1)},    {"name", bin("kv")},   {"size", number(1)},
                      {"kind", number(0)}, {"access", number(3)}, {"desc", array_of({})}};
  EXPECT_TRUE(outcome(with(welcome_fields(), "regions", array_of({region}))).is_ok());
  expect_malformed(outcome(with(welcome_fields(), "regions", array_of({with(region, "kind", number(2))}))),
                   "field 'regions': field 'kind': 2 is above 1");
  expect_malformed(outcome(with(welcome_fields(), "regions", array_of({with(region, "access", number(4))}))),
                   "field 'regions': field 'access': 4 is above 3");
}

// ---------------------------------------------------------------- limits

TEST(MessageLimits, TheLongestStringIsReadAndALongerOneIsNot) {
  EXPECT_TRUE(outcome(with(hello_fields(), "name", bin(std::string(max_control_string, 'n')))).is_ok());
  const Status status = outcome(with(hello_fields(), "name", bin(std::string(max_control_string + 1, 'n'))));
  EXPECT_TRUE(status == Errc::malformed) << status.to_string();
}

TEST(MessageLimits, TheLargestArrayIsReadAndALargerOneIsNot) {
  WelcomeMessage full;
  full.ports.resize(max_control_array);
  const auto decoded = decode(bytes_of(encode({1, full})));
  ASSERT_TRUE(decoded) << decoded.status().to_string();
  EXPECT_EQ(std::get<WelcomeMessage>(decoded->body).ports.size(), max_control_array);
  full.ports.resize(max_control_array + 1);
  EXPECT_TRUE(decode(bytes_of(encode({1, full}))).status() == Errc::malformed);
}

TEST(MessageLimits, AMessageBeyondTheLimitIsRefusedBySizeAlone) {
  const std::string huge(max_control_bytes + 1, '\xc0');
  const auto decoded = decode(bytes_of(huge));
  ASSERT_FALSE(decoded);
  EXPECT_TRUE(decoded.status() == Errc::malformed);
  EXPECT_NE(decoded.status().text().find(std::to_string(max_control_bytes)), std::string_view::npos);
}

// Headers that promise more than follows must not make the reader allocate what they promise.
TEST(MessageLimits, PromisesOfMoreAreRefused) {
  const std::string array32("\xdd\xff\xff\xff\xff", 5);
  const std::string map32("\xdf\xff\xff\xff\xff", 5);
  const std::string map_of_33("\xde\x00\x21", 3);
  const std::string bin32("\xc6\xff\xff\xff\xff", 5);
  const std::string str32("\xdb\xff\xff\xff\xff", 5);
  const std::string ext8("\xc7\x01\x05x", 4);
  const std::string map_with_value("\x81\xa1v", 3);
  for (const std::string& promise : {array32, map32, map_of_33, bin32, str32, ext8}) {
    EXPECT_TRUE(decode(bytes_of(promise)).status() == Errc::malformed);
    EXPECT_TRUE(decode(bytes_of(map_with_value + promise)).status() == Errc::malformed);
  }
}

TEST(MessageLimits, DeepNestingIsRefused) {
  const std::string head("\x81\xa1v", 3);
  for (const std::string& level : {std::string("\x91"), std::string("\x81\xa1k", 3)}) {
    std::string bomb = head;
    for (int i = 0; i < 100000; ++i) bomb += level;
    bomb += '\xc0';
    EXPECT_TRUE(decode(bytes_of(bomb)).status() == Errc::malformed);
  }
}

// Wide arrays inside wide arrays, each header promising the most it may.
TEST(MessageLimits, ABombOfWideArraysIsRefused) {
  std::string bomb("\x81\xa1v", 3);
  for (int i = 0; i < 7; ++i) bomb += std::string("\xdc\x40\x00", 3);
  EXPECT_TRUE(decode(bytes_of(bomb)).status() == Errc::malformed);
}

}  // namespace
}  // namespace kvferry
