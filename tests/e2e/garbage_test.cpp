// Random, truncated and almost right bytes on every socket of an engine, while it does its work: the
// connection is dropped, the process lives, real transfers stay right, and nothing piles up.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <kvferry/transports/shm/protocol.hpp>
#include <kvferry/transports/tcp/wire.hpp>

#include "tests/e2e/control_client.hpp"
#include "tests/e2e/target.hpp"

namespace kvferry::test {
namespace {

using Bytes = std::vector<std::byte>;

/// A connected stream or packet socket that is thrown bytes at and closed.
class Victim {
 public:
  /// "127.0.0.1:PORT".
  static Victim tcp(const std::string& address) {
    sockaddr_in place{};
    place.sin_family = AF_INET;
    place.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    place.sin_port = htons(static_cast<std::uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
    return Victim(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), &place, sizeof place);
  }
  /// A name in the abstract name space.
  static Victim unix_packets(const std::string& name) {
    sockaddr_un place{};
    place.sun_family = AF_UNIX;
    std::memcpy(place.sun_path + 1, name.data(), name.size());
    const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    return Victim(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0), &place, size);
  }
  Victim(Victim&& other) noexcept : socket_(std::exchange(other.socket_, -1)), connected_(other.connected_) {}
  ~Victim() {
    if (socket_ >= 0) ::close(socket_);
  }

  bool connected() const { return connected_; }
  void send(std::span<const std::byte> bytes) const {
    [[maybe_unused]] const auto sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  /// Whether the other side closes within the limit; what it says until then is not listened to.
  bool is_dropped(Duration limit) const {
    const TimePoint until = Clock::now() + limit;
    std::array<std::byte, 65536> rest;
    while (Clock::now() < until) {
      const auto got = ::recv(socket_, rest.data(), rest.size(), MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN)) return true;
      if (got < 0) std::this_thread::sleep_for(1ms);
    }
    return false;
  }

 private:
  Victim(int socket, const void* place, socklen_t size)
      : socket_(socket), connected_(::connect(socket, static_cast<const sockaddr*>(place), size) == 0) {}
  int socket_;
  bool connected_;
};

class Noise {
 public:
  explicit Noise(std::uint32_t seed) : random_(seed) {}

  std::size_t below(std::size_t limit) { return random_() % limit; }

  Bytes bytes(std::size_t size) {
    Bytes bytes(size);
    for (auto& byte : bytes) byte = static_cast<std::byte>(random_());
    return bytes;
  }

  /// Cut short, lengthened, or with some bytes changed.
  Bytes spoiled(Bytes bytes) {
    switch (below(4)) {
      case 0:
        bytes.resize(below(bytes.size()));
        break;
      case 1: {
        const Bytes more = this->bytes(1 + below(64));
        bytes.insert(bytes.end(), more.begin(), more.end());
        break;
      }
      default:
        for (std::size_t i = 0; i < 1 + below(4); ++i) bytes[below(bytes.size())] = static_cast<std::byte>(random_());
    }
    return bytes;
  }

 private:
  std::mt19937 random_;
};

Bytes to_bytes(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

std::string_view to_text(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

/// An engine in another process, a real transfer going on with it, and what a stranger can learn of it.
class GarbageTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(target_.ask("allocate kv " + std::to_string(bytes)), "ok");
    ASSERT_EQ(target_.ask("fill kv 1"), "ok");
    welcome_ = greet(77);
    traffic_ = std::jthread([this](const std::stop_token& stop) { read_on_and_on(stop); });
    ASSERT_TRUE(moves_on(1)) << first_error_.to_string();
  }

  void TearDown() override {
    EXPECT_TRUE(moves_on(2));
    traffic_.request_stop();
    traffic_.join();
    EXPECT_TRUE(first_error_.is_ok()) << first_error_.to_string();
    EXPECT_EQ(wrong_, 0u);
    // Alive, and as polite as ever.
    EXPECT_EQ(target_.ask("wrong kv 1"), "0");
  }

  /// A handshake as any engine makes one: the token opens data channels.
  WelcomeMessage greet(std::uint64_t incarnation) {
    ControlClient client(target_.address);
    const auto answer =
        client.ask({1, HelloMessage{protocol_version, "stranger", incarnation, local_host().host_id}}, slow(5s));
    if (!answer || !std::holds_alternative<WelcomeMessage>(answer->body)) throw std::runtime_error("no welcome");
    return std::get<WelcomeMessage>(answer->body);
  }

  std::string port_of(const std::string& transport) const {
    for (const PortAdvert& port : welcome_.ports)
      if (port.transport == transport) return port.address;
    throw std::runtime_error("no port of " + transport);
  }

  /// Runs `attack` with rising numbers: first to warm up, then often, with descriptors and memory watched.
  template <class Attack>
  void repeat(std::uint32_t warm_up, std::uint32_t times, Attack&& attack) {
    for (std::uint32_t i = 0; i < warm_up; ++i) attack(i);
    ASSERT_TRUE(settles());
    const int descriptors = target_.process.open_descriptors();
    const long memory = target_.process.status_value("VmRSS");
    for (std::uint32_t i = 0; i < times; ++i) attack(warm_up + i);
    EXPECT_TRUE(eventually(slow(8s), [&] { return target_.process.open_descriptors() <= descriptors; }))
        << descriptors << " descriptors before, " << target_.process.open_descriptors() << " now";
    // Sanitizers keep what is freed.
    if (!sanitized) {
      EXPECT_LT(target_.process.status_value("VmRSS"), memory + 4096) << "kB";
    }
  }

  static constexpr std::uint64_t bytes = 4 * mib;

  Target target_{{"KVFERRY_NAME=target"}};
  WelcomeMessage welcome_;

 private:
  bool settles() {
    int before = -1;
    return eventually(slow(8s), [&] {
      const int now = target_.process.open_descriptors();
      const bool same = now == std::exchange(before, now);
      if (!same) std::this_thread::sleep_for(100ms);
      return same;
    });
  }

  /// That many more rounds of real transfers end.
  bool moves_on(std::size_t rounds) {
    const std::size_t before = rounds_;
    return eventually(slow(10s), [&] { return rounds_ >= before + rounds; });
  }

  void read_on_and_on(const std::stop_token& stop) {
    Engine engine = start(config_of("initiator", "tcp"));
    Engine neighbour = start(config_of("neighbour", "shm"));
    std::vector<std::pair<Engine*, Peer>> ways;
    ways.emplace_back(&engine, engine.connect(target_.address).value());
    ways.emplace_back(&neighbour, neighbour.connect(target_.address).value());
    std::vector<Region> regions;
    for (auto& [reader, peer] : ways) regions.push_back(reader->allocate("local", bytes).value());
    const Slice all{0, 0, bytes};
    while (!stop.stop_requested() && first_error_.is_ok()) {
      for (std::size_t i = 0; i < ways.size(); ++i) {
        std::memset(regions[i].data(), 0, bytes);
        const Status status = ways[i].first->read(ways[i].second, regions[i], "kv", {&all, 1}).wait();
        if (!status.is_ok()) first_error_ = status;
        wrong_ += wrong_bytes(regions[i].bytes(), 1);
      }
      ++rounds_;
      std::this_thread::sleep_for(2ms);
    }
  }

  Status first_error_;
  std::size_t wrong_ = 0;
  std::atomic<std::size_t> rounds_{0};
  std::jthread traffic_;
};

// ---------------------------------------------------------------- control port

TEST_F(GarbageTest, OnTheControlPortItself) {
  Noise noise(1);
  repeat(30, 300, [&](std::uint32_t i) {
    const Victim victim = Victim::tcp(target_.address);
    ASSERT_TRUE(victim.connected());
    // A ZeroMQ greeting begins with ff, eight bytes and 7f: some get past that.
    Bytes bytes = noise.bytes(1 + noise.below(300));
    if (i % 2 == 0) bytes[0] = std::byte{0xff};
    if (i % 2 == 0 && bytes.size() > 9) bytes[9] = std::byte{0x7f};
    victim.send(bytes);
    if (i % 16 == 0) victim.is_dropped(5ms);
  });
}

TEST_F(GarbageTest, InControlMessages) {
  Noise noise(2);
  ControlClient client(target_.address);
  const std::vector<ControlMessage> sound = {
      {1, HelloMessage{protocol_version, "stranger", 78, "host"}},
      {2, PingMessage{79}},
      {3, FindRegionMessage{79, "kv"}},
      {4, ByeMessage{79}},
      {5, welcome_},
  };
  repeat(200, 4000, [&](std::uint32_t i) {
    client.send(i % 4 == 0 ? to_text(noise.bytes(noise.below(200)))
                           : to_text(noise.spoiled(to_bytes(encode(sound[i % sound.size()])))));
    // Sometimes it is answered: read that, as the queue is not endless.
    if (i % 64 == 0)
      while (client.receive(1ms)) {
      }
  });
  EXPECT_GE(target_.ask_number("counter malformed_messages"), 1000u);
  EXPECT_TRUE(client.ask({9, PingMessage{79}}, slow(2s)));
}

TEST_F(GarbageTest, InHellosWithoutEnd) {
  // Every hello is a session that costs memory; one that comes again and again must not add up.
  repeat(50, 500, [&](std::uint32_t) { greet(77); });
}

// ---------------------------------------------------------------- tcp data port

Bytes tcp_hello(const WelcomeMessage& welcome, std::uint64_t nonce) {
  Bytes hello(tcp::hello_bytes);
  tcp::encode(tcp::Hello{tcp::Purpose::data, 0, welcome.token, welcome.incarnation, nonce}, hello.data());
  return hello;
}

TEST_F(GarbageTest, OnTheTcpDataPort) {
  Noise noise(3);
  const std::string address = port_of("tcp");
  repeat(50, 500, [&](std::uint32_t i) {
    const Victim victim = Victim::tcp(address);
    ASSERT_TRUE(victim.connected());
    victim.send(i % 2 == 0 ? noise.bytes(1 + noise.below(300)) : noise.spoiled(tcp_hello(welcome_, i)));
    if (i % 50 == 0) victim.is_dropped(5ms);
  });
}

TEST_F(GarbageTest, BehindAHelloOnTheTcpDataPort) {
  Noise noise(4);
  const std::string address = port_of("tcp");
  const RegionKey key = welcome_.regions.at(0).key;
  repeat(50, 500, [&](std::uint32_t i) {
    const Victim victim = Victim::tcp(address);
    ASSERT_TRUE(victim.connected());
    victim.send(tcp_hello(welcome_, 1000 + i));
    if (i % 3 == 0) return victim.send(noise.bytes(1 + noise.below(400)));
    // Reads and messages, as a write that stays right would do what it says.
    tcp::Request request;
    request.op = i % 3 == 1 ? Op::read : Op::send;
    request.id = i;
    request.region = key;
    request.descriptors = request.op == Op::read ? 1 : 0;
    request.payload_bytes = 64;
    Bytes bytes(tcp::request_bytes + tcp::descriptor_bytes);
    tcp::encode(request, bytes.data());
    tcp::encode(tcp::Descriptor{noise.below(2 * GarbageTest::bytes), 64}, bytes.data() + tcp::request_bytes);
    victim.send(noise.spoiled(bytes));
    if (i % 50 == 1) victim.is_dropped(5ms);
  });
}

TEST_F(GarbageTest, RequestsThatReachTooFarAreAnsweredWithAnError) {
  const Victim victim = Victim::tcp(port_of("tcp"));
  victim.send(tcp_hello(welcome_, 1));
  // A length that no region has, whose sum overflows, and a write that says more than it brings.
  for (const std::uint64_t length : {std::uint64_t{1} << 40, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    tcp::Request request;
    request.id = 1;
    request.region = welcome_.regions.at(0).key;
    request.descriptors = 1;
    request.payload_bytes = length;
    Bytes bytes(tcp::request_bytes + tcp::descriptor_bytes);
    tcp::encode(request, bytes.data());
    tcp::encode(tcp::Descriptor{8, length}, bytes.data() + tcp::request_bytes);
    victim.send(bytes);
  }
  std::this_thread::sleep_for(50ms);
  EXPECT_LT(target_.process.status_value("VmRSS"), 2 * 1024 * 1024) << "kB: nobody gets memory for a number";
}

TEST_F(GarbageTest, SilentConnectionsDoNotKeepOthersOut) {
  std::vector<Victim> silent;
  for (int i = 0; i < 400; ++i) {
    silent.push_back(i % 2 == 0 ? Victim::tcp(port_of("tcp")) : Victim::unix_packets(port_of("shm")));
    if (i % 10 == 0) std::this_thread::sleep_for(1ms);
  }
  for (const char* kind : {"tcp", "shm"}) {
    Engine engine = start(config_of(std::string("late-") + kind, kind));
    const auto peer = engine.connect(target_.address);
    EXPECT_TRUE(peer) << peer.status().to_string();
  }
}

// ---------------------------------------------------------------- shm socket

Bytes shm_hello(const WelcomeMessage& welcome) {
  shm::HelloPacket hello;
  hello.token = welcome.token;
  hello.target_incarnation = welcome.incarnation;
  const auto bytes = shm::bytes_of(hello);
  return {bytes.begin(), bytes.end()};
}

TEST_F(GarbageTest, OnTheSharedMemorySocket) {
  Noise noise(5);
  const std::string name = port_of("shm");
  repeat(50, 500, [&](std::uint32_t i) {
    const Victim victim = Victim::unix_packets(name);
    if (!victim.connected()) return std::this_thread::sleep_for(1ms);
    victim.send(i % 2 == 0 ? noise.bytes(1 + noise.below(300)) : noise.spoiled(shm_hello(welcome_)));
    if (i % 50 == 0) victim.is_dropped(5ms);
  });
}

TEST_F(GarbageTest, BehindAHelloOnTheSharedMemorySocket) {
  Noise noise(6);
  const std::string name = port_of("shm");
  repeat(50, 500, [&](std::uint32_t i) {
    const Victim victim = Victim::unix_packets(name);
    if (!victim.connected()) return std::this_thread::sleep_for(1ms);
    victim.send(shm_hello(welcome_));
    if (i % 3 == 0) return victim.send(noise.bytes(1 + noise.below(400)));
    shm::RegionRequestPacket request;
    request.key = welcome_.regions.at(0).key;
    shm::MessagePacket message;
    message.number = i;
    message.sequence = i;
    const auto packet = i % 3 == 1 ? shm::bytes_of(request) : shm::bytes_of(message);
    victim.send(noise.spoiled({packet.begin(), packet.end()}));
    if (i % 50 == 1) victim.is_dropped(5ms);
  });
}

// ---------------------------------------------------------------- dropped, not only ignored

TEST_F(GarbageTest, WhatMakesNoSenseIsDropped) {
  const Bytes nonsense(64, std::byte{0x5a});
  const Victim tcp = Victim::tcp(port_of("tcp"));
  tcp.send(nonsense);
  EXPECT_TRUE(tcp.is_dropped(slow(1s)));
  const Victim behind_hello = Victim::tcp(port_of("tcp"));
  behind_hello.send(tcp_hello(welcome_, 1));
  behind_hello.send(nonsense);
  EXPECT_TRUE(behind_hello.is_dropped(slow(1s)));
  const Victim shm = Victim::unix_packets(port_of("shm"));
  shm.send(nonsense);
  EXPECT_TRUE(shm.is_dropped(slow(1s)));
  const Victim shm_behind_hello = Victim::unix_packets(port_of("shm"));
  shm_behind_hello.send(shm_hello(welcome_));
  shm_behind_hello.send(nonsense);
  EXPECT_TRUE(shm_behind_hello.is_dropped(slow(1s)));
  const Victim control = Victim::tcp(target_.address);
  Bytes greeting(64, std::byte{0x5a});
  greeting[0] = std::byte{0xff};
  greeting[9] = std::byte{0x7f};
  greeting[10] = std::byte{3};
  control.send(greeting);
  EXPECT_TRUE(control.is_dropped(slow(6s)));
}

}  // namespace
}  // namespace kvferry::test
