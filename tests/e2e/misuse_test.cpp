// Every way to use an engine wrongly that we could think of: each is a clear error, none is harmful.
#include <cstring>
#include <future>
#include <thread>

#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/e2e/control_client.hpp"
#include "tests/e2e/engines.hpp"

namespace kvferry::test {
namespace {

constexpr std::uint64_t huge = ~std::uint64_t{0};

void expect_error(const Status& status, Errc code, std::initializer_list<std::string_view> words = {}) {
  EXPECT_EQ(status.code(), code) << status.to_string();
  for (const auto word : words)
    EXPECT_NE(status.text().find(word), std::string_view::npos) << "'" << word << "' is not in: " << status.text();
}

class MisuseTest : public ::testing::TestWithParam<const char*> {
 protected:
  Status write(std::vector<Slice> slices) { return pair_.initiator.write(pair_.peer, ours_, "kv", slices).wait(); }

  Pair pair_{GetParam()};
  Region theirs_ = pair_.target.allocate("kv", 64 * kib).value();
  Region ours_ = pair_.initiator.allocate("local", 32 * kib).value();
};

INSTANTIATE_TEST_SUITE_P(, MisuseTest, each_transport(), transport_name);

// ---------------------------------------------------------------- slices

TEST_P(MisuseTest, SlicesOutOfBoundsNameTheSliceAndTheRegion) {
  fill(ours_.bytes(), 1);
  // Once with the region unknown yet, and again with its size at hand.
  for (int round = 0; round < 2; ++round) {
    expect_error(write({{0, 0, 8}, {32 * kib - 7, 0, 8}}), Errc::out_of_bounds, {"slice 1", "'local'", "32768"});
    expect_error(write({{0, 64 * kib - 7, 8}}), Errc::out_of_bounds, {"slice 0", "'kv'", "65536", "target"});
    expect_error(write({{0, 64 * kib + 1, 0}}), Errc::out_of_bounds, {"'kv'"});
  }
  EXPECT_EQ(nonzero_bytes(theirs_.bytes()), 0u) << "a batch with a wrong slice does nothing at all";
}

TEST_P(MisuseTest, OffsetsThatOverflowAreOutOfBounds) {
  for (const Slice slice : {Slice{huge, 0, 1}, Slice{0, huge, 1}, Slice{1, 0, huge}, Slice{0, 1, huge},
                            Slice{0, 0, huge}, Slice{huge, huge, huge}, Slice{huge - 3, 0, 8}, Slice{0, huge - 3, 8}})
    expect_error(write({slice}), Errc::out_of_bounds);
  // Two whose sum of lengths overflows.
  expect_error(write({{0, 0, huge / 2 + 1}, {0, 0, huge / 2 + 1}}), Errc::out_of_bounds);
}

TEST_P(MisuseTest, NothingToDoIsDoneAtOnce) {
  EXPECT_TRUE(write({}));
  EXPECT_TRUE(write({{0, 0, 0}}));
  EXPECT_TRUE(write({{32 * kib, 64 * kib, 0}})) << "an empty slice may stand at the very end";
  EXPECT_TRUE(pair_.initiator.read(pair_.peer, ours_, "kv", {}).wait());
  const Transfer pure = pair_.initiator.write_imm(pair_.peer, ours_, "kv", {}, 77);
  EXPECT_TRUE(pure.wait()) << pure.status().to_string();
  EXPECT_EQ(pure.bytes(), 0u);
  EXPECT_EQ(pair_.target.next_notification(slow(5s)).value().immediate, 77u);
  EXPECT_EQ(pair_.target.next_notification(50ms).status().code(), Errc::timed_out);
}

TEST_P(MisuseTest, EmptySlicesBetweenOthersDoNotDisturb) {
  fill(ours_.bytes(), 2);
  const Status status = write({{0, 0, 0}, {0, 8, 16}, {5, 5, 0}, {16, 24, 40}, {1, 1, 0}});
  EXPECT_TRUE(status) << status.to_string();
  EXPECT_EQ(wrong_bytes(theirs_.bytes().subspan(8, 56), 2), 0u);
  EXPECT_EQ(nonzero_bytes(theirs_.bytes().first(8)), 0u);
  EXPECT_EQ(nonzero_bytes(theirs_.bytes().subspan(64)), 0u);
}

// ---------------------------------------------------------------- regions

TEST_P(MisuseTest, UnknownRegionsAreNamed) {
  const Slice slice{0, 0, 8};
  expect_error(pair_.initiator.read(pair_.peer, ours_, "nothing", {&slice, 1}).wait(), Errc::unknown_region,
               {"'nothing'", "target"});
  expect_error(pair_.initiator.read(pair_.peer, ours_, "", {&slice, 1}).wait(), Errc::invalid_argument,
               {"remote region"});
  expect_error(pair_.initiator.find_region(pair_.peer, "nothing").status(), Errc::unknown_region, {"'nothing'"});
}

TEST_P(MisuseTest, NamesAndMemoryAreRegisteredOnce) {
  std::vector<std::byte> memory(16 * kib);
  Engine& engine = pair_.initiator;
  const Region middle = engine.register_memory("middle", memory.data() + 4 * kib, 8 * kib).value();
  expect_error(engine.register_memory("middle", memory.data(), 1 * kib).status(), Errc::already_exists, {"'middle'"});
  expect_error(engine.register_memory("same", memory.data() + 4 * kib, 8 * kib).status(), Errc::already_exists,
               {"'same'", "'middle'"});
  expect_error(engine.register_memory("head", memory.data(), 4 * kib + 1).status(), Errc::already_exists);
  expect_error(engine.register_memory("tail", memory.data() + 12 * kib - 1, 8).status(), Errc::already_exists);
  expect_error(engine.register_memory("inside", memory.data() + 5 * kib, 8).status(), Errc::already_exists);
  expect_error(engine.register_memory("around", memory.data(), 16 * kib).status(), Errc::already_exists);
  EXPECT_TRUE(engine.register_memory("before", memory.data(), 4 * kib));
  EXPECT_TRUE(engine.register_memory("after", memory.data() + 12 * kib, 4 * kib));
  EXPECT_TRUE(engine.unregister_region(middle));
  EXPECT_TRUE(engine.register_memory("middle", memory.data() + 4 * kib, 8 * kib)) << "what was given back is free";
}

TEST_P(MisuseTest, RegionsNeedMemoryAndAName) {
  Engine& engine = pair_.initiator;
  std::byte byte{};
  expect_error(engine.register_memory("null", nullptr, 8).status(), Errc::invalid_argument, {"'null'"});
  expect_error(engine.register_memory("none", &byte, 0).status(), Errc::invalid_argument, {"'none'"});
  expect_error(engine.register_memory("wraps", &byte, huge).status(), Errc::invalid_argument, {"'wraps'"});
  expect_error(engine.allocate("zero", 0).status(), Errc::invalid_argument, {"'zero'"});
  EXPECT_FALSE(engine.allocate("monstrous", huge).is_ok());
  EXPECT_FALSE(engine.allocate("monstrous", huge / 4).is_ok());
}

TEST_P(MisuseTest, AWithdrawnRegionIsGone) {
  Engine& engine = pair_.initiator;
  const Slice slice{0, 0, 8};
  ASSERT_TRUE(engine.read(pair_.peer, ours_, "kv", {&slice, 1}).wait());
  const RemoteHandle handle = engine.find_region(pair_.peer, "kv").value();
  ASSERT_TRUE(pair_.target.unregister_region(theirs_));
  expect_error(pair_.target.unregister_region(theirs_), Errc::unknown_region, {"'kv'"});
  expect_error(engine.read(pair_.peer, ours_, "kv", {&slice, 1}).wait(), Errc::unknown_region);
  expect_error(engine.read(pair_.peer, ours_, handle, {&slice, 1}).wait(), Errc::unknown_region);
  // Its successor of the same name is another region, found anew.
  const Region next = pair_.target.allocate("kv", 128).value();
  fill(next.bytes(), 3);
  EXPECT_TRUE(engine.read(pair_.peer, ours_, "kv", {&slice, 1}).wait());
  EXPECT_EQ(wrong_bytes(ours_.bytes().first(8), 3), 0u);
  expect_error(engine.read(pair_.peer, ours_, handle, {&slice, 1}).wait(), Errc::unknown_region);

  ASSERT_TRUE(engine.unregister_region(ours_));
  expect_error(engine.read(pair_.peer, ours_, "kv", {&slice, 1}).wait(), Errc::unknown_region, {"'local'"});
}

// ---------------------------------------------------------------- unregister while in flight

TEST_P(MisuseTest, UnregisteringLocalMemoryEndsItsTransfersFirst) {
  FaultyPair faulty(GetParam());
  Engine& engine = faulty.pair.initiator;
  const Region theirs = faulty.pair.target.allocate("kv", 4 * mib).value();
  fill(theirs.bytes(), 1);
  for (const bool deaf : {false, true}) {
    std::vector<std::byte> memory(4 * mib);
    const Region ours = engine.register_memory("local", memory.data(), memory.size()).value();
    faulty.plan->ignore_cancel = deaf;
    faulty.plan->delay_us = std::chrono::microseconds(slow(500ms)).count();
    const Slice all{0, 0, 4 * mib};
    const std::uint64_t before = faulty.plan->items;
    const Transfer transfer = engine.read(faulty.pair.peer, ours, "kv", {&all, 1});
    ASSERT_TRUE(eventually(slow(5s), [&] { return faulty.plan->items > before; }));
    const TimePoint begin = Clock::now();
    const Status status = engine.unregister_region(ours);
    EXPECT_TRUE(status) << status.to_string();
    EXPECT_LT(Clock::now() - begin, slow(2s));
    EXPECT_TRUE(transfer.done());
    expect_error(transfer.status(), Errc::cancelled, {"'local'"});
    const Snapshot freed(memory);
    std::this_thread::sleep_for(slow(700ms));
    EXPECT_EQ(freed.changed_bytes(), 0u) << "memory moved after it was given back";
    faulty.plan->delay_us = 0;
  }
}

TEST_P(MisuseTest, UnregisteringServedMemoryQuietensIt) {
  Pair pair{std::string(GetParam())};
  std::vector<std::byte> memory(32 * mib);
  for (const bool own_memory : {true, false}) {
    const Region theirs = own_memory ? pair.target.register_memory("kv", memory.data(), memory.size()).value()
                                     : pair.target.allocate("kv", 32 * mib).value();
    const std::string local = own_memory ? "local-a" : "local-b";
    const Region ours = pair.initiator.allocate(local, 32 * mib).value();
    fill(ours.bytes(), 4);
    const Slice all{0, 0, 32 * mib};
    std::vector<Transfer> transfers;
    for (int i = 0; i < 8; ++i) transfers.push_back(pair.initiator.write(pair.peer, ours, "kv", {&all, 1}));
    ASSERT_TRUE(eventually(
        slow(5s), [&] { return std::atomic_ref(*theirs.data()).load() != std::byte{0} || transfers.front().done(); }));
    const TimePoint begin = Clock::now();
    const Status status = pair.target.unregister_region(theirs);
    EXPECT_TRUE(status) << status.to_string();
    EXPECT_LT(Clock::now() - begin, slow(2500ms));
    std::memset(theirs.data(), 0, theirs.size());
    std::this_thread::sleep_for(100ms);
    EXPECT_EQ(nonzero_bytes(theirs.bytes()), 0u) << "memory moved after it was given back";
    for (const Transfer& transfer : transfers) {
      ASSERT_TRUE(transfer.wait_for(slow(5s)));
      const Errc code = transfer.status().code();
      EXPECT_TRUE(code == Errc::ok || code == Errc::unknown_region) << transfer.status().to_string();
    }
    EXPECT_EQ(transfers.back().status().code(), Errc::unknown_region) << transfers.back().status().to_string();
  }
}

// ---------------------------------------------------------------- handles

TEST_P(MisuseTest, EmptyHandlesAreRefused) {
  Engine& engine = pair_.initiator;
  const Slice slice{0, 0, 8};
  std::byte buffer[8];
  expect_error(engine.read(Peer(), ours_, "kv", {&slice, 1}).wait(), Errc::invalid_argument, {"peer"});
  expect_error(engine.read(pair_.peer, Region(), "kv", {&slice, 1}).wait(), Errc::invalid_argument, {"region"});
  expect_error(engine.read(pair_.peer, ours_, RemoteHandle(), {&slice, 1}).wait(), Errc::invalid_argument);
  expect_error(engine.send(Peer(), buffer).wait(), Errc::invalid_argument);
  expect_error(engine.recv(Peer(), buffer).wait(), Errc::invalid_argument);
  expect_error(engine.find_region(Peer(), "kv").status(), Errc::invalid_argument);
  expect_error(engine.unregister_region(Region()), Errc::invalid_argument);
  expect_error(Transfer().wait(), Errc::invalid_argument);
  engine.disconnect(Peer());
  Transfer().cancel();
}

TEST_P(MisuseTest, HandlesOfAnotherEngineAreRefused) {
  const Slice slice{0, 0, 8};
  std::byte buffer[8];
  // The target knows no peer of that number, or another one.
  expect_error(pair_.target.write(pair_.peer, theirs_, "kv", {&slice, 1}).wait(), Errc::invalid_argument, {"another"});
  expect_error(pair_.target.send(pair_.peer, buffer).wait(), Errc::invalid_argument, {"another"});
  expect_error(pair_.target.find_region(pair_.peer, "kv").status(), Errc::invalid_argument, {"another"});
  expect_error(pair_.initiator.read(pair_.peer, theirs_, "kv", {&slice, 1}).wait(), Errc::unknown_region, {"'kv'"});
  expect_error(pair_.initiator.unregister_region(theirs_), Errc::unknown_region, {"'kv'"});
  pair_.target.disconnect(pair_.peer);
  EXPECT_TRUE(pair_.initiator.read(pair_.peer, ours_, "kv", {&slice, 1}).wait());
}

TEST_P(MisuseTest, APeerThatOnlyConnectedToUsCanNotBeRead) {
  const Peer inbound = pair_.target.accept("initiator", slow(2s)).value();
  const Slice slice{0, 0, 8};
  expect_error(pair_.target.read(inbound, theirs_, "local", {&slice, 1}).wait(), Errc::no_path, {"connect"});
  expect_error(pair_.target.accept("nobody", 30ms).status(), Errc::timed_out, {"'nobody'"});
}

TEST_P(MisuseTest, ValuesBeyondAnEnumAreRefused) {
  const Slice slice{0, 0, 8};
  const TransferOptions options{.priority = static_cast<Priority>(3)};
  std::vector<std::byte> buffer(8);
  for (const Transfer& transfer :
       {pair_.initiator.read(pair_.peer, ours_, "kv", {&slice, 1}, options),
        pair_.initiator.write(pair_.peer, ours_, "kv", {&slice, 1}, options),
        pair_.initiator.write_imm(pair_.peer, ours_, "kv", {}, 1, options),
        pair_.initiator.send(pair_.peer, buffer, options), pair_.initiator.recv(pair_.peer, buffer, options)}) {
    EXPECT_EQ(transfer.wait().code(), Errc::invalid_argument);
    EXPECT_NE(transfer.status().text().find("3 is no priority"), std::string_view::npos) << transfer.status().text();
  }
  const auto bad = static_cast<Access>(4);
  EXPECT_EQ(pair_.target.allocate("bad", 4096, {.access = bad}).status().code(), Errc::invalid_argument);
  EXPECT_EQ(pair_.target.allocate("bad", 4096, {.leasable = bad}).status().code(), Errc::invalid_argument);
  EXPECT_TRUE(pair_.target.allocate("bad", 4096)) << "nothing is left of what was refused";
}

TEST_P(MisuseTest, MemoryThatIsNotMappedIsRefused) {
  const std::size_t page = 4096;
  void* place = ::mmap(nullptr, 3 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(place, MAP_FAILED);
  std::byte* data = static_cast<std::byte*>(place);
  ::munmap(data + page, page);
  const Status hole = pair_.target.register_memory("hole", data, 3 * page).status();
  EXPECT_EQ(hole.code(), Errc::invalid_argument);
  EXPECT_NE(hole.text().find("'hole': not all of the 12288 bytes"), std::string_view::npos) << hole.text();
  EXPECT_FALSE(pair_.target.register_memory("end", data + page - 8, 16));
  EXPECT_TRUE(pair_.target.register_memory("before", data + 8, page - 8));
  EXPECT_TRUE(pair_.target.register_memory("after", data + 2 * page, page));
  ::munmap(data, 3 * page);
}

TEST_P(MisuseTest, NegativeDeadlinesAreRefused) {
  const Slice slice{0, 0, 8};
  expect_error(pair_.initiator.read(pair_.peer, ours_, "kv", {&slice, 1}, {.deadline = -1ms}).wait(),
               Errc::invalid_argument, {"deadline"});
}

// ---------------------------------------------------------------- addresses

TEST(Addresses, APortInUseIsNamed) {
  const Engine first = start(config_of("first"));
  EngineConfig config = config_of("second");
  config.listen = first.address();
  expect_error(Engine::start(config).status(), Errc::address_in_use, {first.address()});
}

TEST(Addresses, AddressesToListenOnMustMakeSense) {
  for (const char* listen :
       {"", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:port", "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:-1", "udp://127.0.0.1:0", "127.0.0.1:0", "tcp://:0"}) {
    EngineConfig config = config_of("engine");
    config.listen = listen;
    const Status status = Engine::start(config).status();
    EXPECT_EQ(status.code(), Errc::invalid_argument) << listen << ": " << status.to_string();
  }
  EngineConfig config = config_of("engine");
  config.listen = "tcp://203.0.113.7:0";  // of RFC 5737: no interface has it
  EXPECT_FALSE(Engine::start(config).is_ok());
}

TEST(Addresses, AddressesToConnectToMustMakeSense) {
  Engine engine = start(config_of("engine"));
  for (const char* address : {"", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x",
                              "tcp://127.0.0.1:0", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:99999999999999999999",
                              "udp://127.0.0.1:9", "127.0.0.1:9", "tcp://:9", "prefill-0"}) {
    const Status status = engine.connect(address).status();
    EXPECT_EQ(status.code(), Errc::invalid_argument) << address << ": " << status.to_string();
    EXPECT_NE(status.text().find(address), std::string_view::npos) << status.to_string();
  }
}

TEST(Addresses, NamesThatDoNotResolveAreNamed) {
  EngineConfig config = config_of("engine");
  config.connect_timeout = 2000ms;
  Engine engine = start(config);
  const TimePoint begin = Clock::now();
  expect_error(engine.connect("tcp://no-such-host.invalid:9").status(), Errc::unreachable, {"no-such-host.invalid"});
  EXPECT_LT(Clock::now() - begin, slow(3s));
  config.listen = "tcp://no-such-host.invalid:0";
  expect_error(Engine::start(config).status(), Errc::unreachable, {"no-such-host.invalid"});
}

TEST(Addresses, NobodyThereIsUnreachableWithinTheTimeout) {
  EngineConfig config = config_of("engine");
  config.connect_timeout = 300ms;
  Engine engine = start(config);
  // A port that nobody has, and one whose owner never says a word.
  const int silent = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in place{};
  place.sin_family = AF_INET;
  place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof place;
  ASSERT_EQ(::bind(silent, reinterpret_cast<sockaddr*>(&place), sizeof place), 0);
  ASSERT_EQ(::getsockname(silent, reinterpret_cast<sockaddr*>(&place), &size), 0);
  const std::string address = "tcp://127.0.0.1:" + std::to_string(ntohs(place.sin_port));
  for (const bool listening : {false, true}) {
    if (listening) {
      ASSERT_EQ(::listen(silent, 8), 0);
    }
    const TimePoint begin = Clock::now();
    expect_error(engine.connect(address).status(), Errc::unreachable, {address});
    EXPECT_GE(Clock::now() - begin, 250ms);
    EXPECT_LT(Clock::now() - begin, slow(1s));
  }
  ::close(silent);
}

TEST(Addresses, TransportsThatNoTwoEnginesShareLeaveNoPath) {
  const Engine target = start(config_of("target", "shm"));
  Engine engine = start(config_of("initiator", "tcp"));
  const TimePoint begin = Clock::now();
  expect_error(engine.connect(target.address()).status(), Errc::no_path, {"target", "tcp"});
  EXPECT_LT(Clock::now() - begin, slow(1s));
}

TEST(Configuration, ValuesOutOfRangeNameTheField) {
  EngineConfig config = config_of("engine");
  config.rails = 0;
  expect_error(Engine::start(config).status(), Errc::invalid_argument, {"rails", "16"});
  config = config_of("engine", "carrier-pigeon");
  expect_error(Engine::start(config).status(), Errc::invalid_argument, {"carrier-pigeon"});
}

// ---------------------------------------------------------------- versions

TEST(Versions, AnInitiatorOfAnotherVersionIsRefusedWithinASecond) {
  const Engine engine = start(config_of("engine"));
  ControlClient stranger(engine.address());
  const TimePoint begin = Clock::now();
  const auto answer = stranger.ask({7, HelloMessage{protocol_version + 1, "stranger", 42, "host"}}, slow(1s));
  ASSERT_TRUE(answer);
  EXPECT_LT(Clock::now() - begin, slow(1s));
  EXPECT_EQ(answer->id, 7u);
  const auto* refused = std::get_if<RefusedMessage>(&answer->body);
  ASSERT_NE(refused, nullptr);
  expect_error(Status(static_cast<Errc>(refused->code), refused->text), Errc::version_mismatch,
               {"speaks protocol version " + std::to_string(protocol_version + 1),
                "speaks " + std::to_string(protocol_version), "'stranger'", "'engine'"});
  EXPECT_EQ(refused->protocol, protocol_version);
  EXPECT_EQ(engine.peers().size(), 0u);
  EXPECT_EQ(counter(engine, "handshakes_refused"), 1u);
}

std::string with_schema_version(std::string message, std::uint32_t version) {
  const auto place = message.find("\xa1v");
  EXPECT_NE(place, std::string::npos);
  EXPECT_EQ(static_cast<unsigned char>(message[place + 2]), schema_version);
  message[place + 2] = static_cast<char>(version);
  return message;
}

TEST(Versions, AnInitiatorOfAnotherSchemaIsToldSo) {
  const Engine engine = start(config_of("engine"));
  ControlClient stranger(engine.address());
  stranger.send(with_schema_version(encode({7, HelloMessage{protocol_version, "stranger", 42, "host"}}), 9));
  const auto answer = stranger.receive(slow(1s));
  ASSERT_TRUE(answer);
  const auto* refused = std::get_if<RefusedMessage>(&answer->body);
  ASSERT_NE(refused, nullptr);
  expect_error(Status(static_cast<Errc>(refused->code), refused->text), Errc::version_mismatch,
               {"9", std::to_string(schema_version)});
}

/// A control port whose owner answers every hello in its own way.
class FakeEngine {
 public:
  explicit FakeEngine(std::function<std::string(const ControlMessage&)> answer) : router_(context_, ZMQ_ROUTER) {
    router_.set(zmq::sockopt::linger, 0);
    router_.set(zmq::sockopt::rcvtimeo, 20);
    router_.bind("tcp://127.0.0.1:*");
    address_ = router_.get(zmq::sockopt::last_endpoint);
    thread_ = std::thread([this, answer = std::move(answer)] {
      while (!stop_) {
        zmq::message_t who;
        zmq::message_t body;
        if (!router_.recv(who) || !router_.recv(body)) continue;
        const auto message = decode({static_cast<const std::byte*>(body.data()), body.size()});
        if (!message || !std::holds_alternative<HelloMessage>(message->body)) continue;
        router_.send(who, zmq::send_flags::sndmore);
        router_.send(zmq::buffer(answer(*message)), zmq::send_flags::none);
      }
    });
  }
  ~FakeEngine() {
    stop_ = true;
    thread_.join();
  }
  const std::string& address() const { return address_; }

 private:
  zmq::context_t context_{1};
  zmq::socket_t router_;
  std::string address_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

class ForeignTarget : public ::testing::Test {
 protected:
  Status connect_to(std::function<std::string(const ControlMessage&)> answer) {
    const FakeEngine fake(std::move(answer));
    Engine engine = start(config_of("engine"));
    const TimePoint begin = Clock::now();
    const Status status = engine.connect(fake.address()).status();
    EXPECT_LT(Clock::now() - begin, slow(1s));
    return status;
  }
};

TEST_F(ForeignTarget, OfAnotherProtocolVersionIsRefusedWithinASecond) {
  const Status welcomed = connect_to([](const ControlMessage& hello) {
    WelcomeMessage welcome;
    welcome.protocol = protocol_version + 1;
    welcome.name = "future";
    welcome.incarnation = 5;
    return encode({hello.id, welcome});
  });
  expect_error(
      welcomed, Errc::version_mismatch,
      {"version " + std::to_string(protocol_version + 1), "speaks " + std::to_string(protocol_version), "future"});
}

TEST_F(ForeignTarget, ThatRefusesOurVersionIsQuoted) {
  const Status refused = connect_to([](const ControlMessage& hello) {
    return encode({hello.id, RefusedMessage{protocol_version + 1, static_cast<std::uint32_t>(Errc::version_mismatch),
                                            "engine 'engine' speaks protocol version 1, engine 'future' speaks 2"}});
  });
  expect_error(refused, Errc::version_mismatch, {"speaks protocol version 1", "speaks 2", "tcp://127.0.0.1"});
}

TEST_F(ForeignTarget, OfAnotherSchemaIsRefusedWithinASecond) {
  const Status status = connect_to([](const ControlMessage& hello) {
    return with_schema_version(encode({hello.id, RefusedMessage{protocol_version, 1, "?"}}), 9);
  });
  expect_error(status, Errc::version_mismatch, {"9", std::to_string(schema_version)});
}

TEST_F(ForeignTarget, ThatTalksNonsenseIsMalformed) {
  const Status status = connect_to([](const ControlMessage&) { return std::string("\x01\x02 nonsense"); });
  expect_error(status, Errc::malformed);
}

}  // namespace
}  // namespace kvferry::test
