// What only TCP can suffer from: strangers, broken bytes, partial reads and writes, lost processes.
#include <algorithm>
#include <array>
#include <csignal>
#include <fstream>
#include <thread>

#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/runtime/log.hpp>
#include <kvferry/transports/tcp/tcp_transport.hpp>

#include "contract_fixture.hpp"
#include "tests/support/sanitizers.hpp"
#include "transports/tcp/socket.hpp"
#include "transports/tcp/wire.hpp"

namespace kvferry::test {
namespace {

using namespace std::chrono_literals;
using tcp::Endpoint;
using tcp::Fd;
using tcp::Hello;
using tcp::HelloReply;
using tcp::Request;
using tcp::Response;
using Bytes = std::vector<std::byte>;

constexpr std::uint64_t incarnation = 0x1122334455667788;
constexpr SessionId session = 42;

ContractParam tcp_param(int sockets = 2) {
  return {"tcp", [sockets] {
            TcpConfig config;
            config.sockets = sockets;
            return make_tcp_transport(config);
          }};
}

template <class Message>
Bytes encoded(const Message& message, std::size_t bytes) {
  Bytes raw(bytes);
  encode(message, raw.data());
  return raw;
}

Bytes operator+(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

Bytes pattern(std::size_t size, unsigned seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + seed);
  return bytes;
}

Token good_token() {
  Token token;
  token.fill(std::byte{7});
  return token;
}

Hello hello_of(std::uint64_t nonce = 1) { return {tcp::Purpose::data, 0, good_token(), incarnation, nonce}; }

Bytes request_bytes(const Request& request, std::span<const tcp::Descriptor> descriptors = {}) {
  Bytes raw = encoded(request, tcp::request_bytes);
  for (const tcp::Descriptor& descriptor : descriptors) raw = raw + encoded(descriptor, tcp::descriptor_bytes);
  return raw;
}

Request request_of(Op op, std::uint32_t id, RegionKey region, std::uint32_t descriptors, std::uint64_t payload) {
  Request request;
  request.op = op;
  request.id = id;
  request.region = region;
  request.descriptors = descriptors;
  request.payload_bytes = payload;
  return request;
}

/// A hand-written peer on a plain socket; `step` lets the port under test work meanwhile.
class RawPeer {
 public:
  RawPeer(Fd fd, std::function<void()> step) : fd_(std::move(fd)), step_(std::move(step)) {
    ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
    tcp::tune_connection(fd_.get());
  }

  /// False once the other side has closed.
  bool send(std::span<const std::byte> bytes) {
    const TimePoint limit = Clock::now() + 10s;
    while (!bytes.empty() && Clock::now() < limit) {
      const ssize_t sent = ::send(fd_.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) bytes = bytes.subspan(static_cast<std::size_t>(sent));
      if (sent < 0 && errno != EAGAIN) return false;
      step_();
    }
    return bytes.empty();
  }
  void dribble(std::span<const std::byte> bytes) {
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      ASSERT_TRUE(send(bytes.subspan(i, 1)));
      step_();
    }
  }
  /// That many bytes, or what came before the end of the stream.
  Bytes receive(std::size_t count) {
    Bytes got(count);
    std::size_t have = 0;
    const TimePoint limit = Clock::now() + 10s;
    while (have < count && Clock::now() < limit) {
      step_();
      const ssize_t part = ::recv(fd_.get(), got.data() + have, count - have, 0);
      if (part == 0 || (part < 0 && errno != EAGAIN)) break;
      if (part > 0) have += static_cast<std::size_t>(part);
    }
    got.resize(have);
    return got;
  }
  /// Steps until the other side closes; false when it does not.
  bool closed_within(std::chrono::milliseconds time) {
    const TimePoint limit = Clock::now() + time;
    std::array<std::byte, 4096> ignored;
    while (Clock::now() < limit) {
      step_();
      const ssize_t part = ::recv(fd_.get(), ignored.data(), ignored.size(), 0);
      if (part == 0 || (part < 0 && errno != EAGAIN)) return true;
    }
    return false;
  }
  HelloReply greet(const Hello& hello) {
    send(encoded(hello, tcp::hello_bytes));
    return reply();
  }
  HelloReply reply() {
    const Bytes raw = receive(tcp::hello_reply_bytes);
    if (raw.size() != tcp::hello_reply_bytes) return {0, Errc::internal, 0};
    const auto decoded = tcp::decode_hello_reply(raw.data());
    if (!decoded) return {0, Errc::malformed, 0};
    text = text_of(receive(decoded->text_bytes));
    return *decoded;
  }
  Response response() {
    const Bytes raw = receive(tcp::response_bytes);
    if (raw.size() != tcp::response_bytes) return {0, Errc::internal, 0, 0};
    const auto decoded = tcp::decode_response(raw.data());
    if (!decoded) return {0, Errc::malformed, 0, 0};
    text = text_of(receive(decoded->text_bytes));
    return *decoded;
  }
  int fd() const { return fd_.get(); }

  std::string text;  ///< of the last reply or response

 private:
  static std::string text_of(const Bytes& bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

  Fd fd_;
  std::function<void()> step_;
};

Fd connect_to(const std::string& address) {
  const auto endpoint = tcp::resolve(address, "127.0.0.1");
  Fd fd(::socket(endpoint->storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(::connect(fd.get(), endpoint->address(), endpoint->size), 0) << address;
  return fd;
}

std::size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total = 0;
  std::size_t resident = 0;
  statm >> total >> resident;
  return resident * 4096;
}

std::size_t open_files() {
  std::size_t count = 0;
  for (int fd = 0; fd < 4096; ++fd) count += ::fcntl(fd, F_GETFD) != -1;
  return count;
}

// ---- the target under test, the peer by hand

class TcpTargetTest : public testing::Test {
 protected:
  TcpTargetTest() : target(tcp_param(), incarnation), served(target.add_region("served", 1 << 20)) {
    target.events.sessions[good_token()] = session;
  }
  RawPeer connect() {
    return {connect_to(target.port->address()), [this] { target.poll(); }};
  }
  RawPeer connected(std::uint64_t nonce = 1) {
    RawPeer peer = connect();
    EXPECT_EQ(peer.greet(hello_of(nonce)).status, Errc::ok) << peer.text;
    return peer;
  }
  void poll_for(std::chrono::milliseconds time) {
    for (const TimePoint limit = Clock::now() + time; Clock::now() < limit;) target.poll();
  }

  Side target;
  std::shared_ptr<const RegionRecord> served;
  std::mt19937_64 random{99};
};

TEST_F(TcpTargetTest, RequestsAreUnderstoodHoweverTheirBytesAreCut) {
  const Bytes content = pattern(served->size, 5);
  std::ranges::copy(content, served->data);
  RawPeer peer = connect();
  peer.dribble(encoded(hello_of(), tcp::hello_bytes));
  ASSERT_EQ(peer.reply().status, Errc::ok);

  const std::array pieces{tcp::Descriptor{100, 70}, tcp::Descriptor{5000, 1}, tcp::Descriptor{9000, 929}};
  peer.dribble(request_bytes(request_of(Op::read, 11, served->key, 3, 1000), pieces));
  Response answer = peer.response();
  EXPECT_EQ(answer.id, 11u);
  ASSERT_EQ(answer.status, Errc::ok) << peer.text;
  ASSERT_EQ(answer.payload_bytes, 1000u);
  const Bytes read = peer.receive(1000);
  EXPECT_TRUE(std::equal(read.begin(), read.begin() + 70, content.begin() + 100));
  EXPECT_EQ(read[70], content[5000]);
  EXPECT_TRUE(std::equal(read.begin() + 71, read.end(), content.begin() + 9000));

  const Bytes payload = pattern(1000, 77);
  Request write = request_of(Op::write_imm, 12, served->key, 3, 1000);
  write.immediate = 0xabcdef01;
  write.sequence = 1ull << 50;
  peer.dribble(request_bytes(write, pieces) + payload);
  EXPECT_EQ(peer.response().status, Errc::ok) << peer.text;
  EXPECT_TRUE(std::equal(payload.begin(), payload.begin() + 70, served->data + 100));
  EXPECT_EQ(served->data[5000], payload[70]);
  EXPECT_TRUE(std::equal(payload.begin() + 71, payload.end(), served->data + 9000));
  ASSERT_EQ(target.events.immediates.size(), 1u);
  EXPECT_EQ(target.events.immediates[0].value, 0xabcdef01u);
  EXPECT_EQ(target.events.immediates[0].sequence, 1ull << 50);

  const Bytes message = pattern(300, 3);
  peer.dribble(request_bytes(request_of(Op::send, 13, {}, 0, 300)) + message);
  EXPECT_EQ(peer.response().id, 13u);
  ASSERT_EQ(target.events.messages.size(), 1u);
  EXPECT_EQ(target.events.messages[0].bytes, message);
}

TEST_F(TcpTargetTest, ManyRequestsInOnePieceAreAllAnswered) {
  RawPeer peer = connected();
  Bytes all;
  for (std::uint32_t id = 0; id < 2000; ++id) {
    const tcp::Descriptor piece{id, 1};
    served->data[id] = static_cast<std::byte>(id);
    all = all + request_bytes(request_of(Op::read, id, served->key, 1, 1), std::span(&piece, 1));
  }
  ASSERT_TRUE(peer.send(all));
  for (std::uint32_t id = 0; id < 2000; ++id) {
    ASSERT_EQ(peer.response().id, id);
    ASSERT_EQ(peer.receive(1).at(0), static_cast<std::byte>(id));
  }
}

TEST_F(TcpTargetTest, ARefusedWriteIsDrainedAndTheConnectionLivesOn) {
  RawPeer peer = connected();
  const std::array pieces{tcp::Descriptor{0, 200000}, tcp::Descriptor{served->size - 5, 100000}};
  const Bytes bad = request_bytes(request_of(Op::write_imm, 1, served->key, 2, 300000), pieces) + pattern(300000, 1);
  const Bytes good = request_bytes(request_of(Op::write, 2, served->key, 1, 5), std::array{tcp::Descriptor{7, 5}});
  ASSERT_TRUE(peer.send(bad + good + pattern(5, 9)));
  EXPECT_EQ(peer.response().status, Errc::out_of_bounds);
  EXPECT_NE(peer.text.find("'served'"), std::string::npos) << peer.text;
  EXPECT_EQ(peer.response().status, Errc::ok) << peer.text;
  EXPECT_EQ(served->data[0], std::byte{0});
  EXPECT_TRUE(std::ranges::equal(pattern(5, 9), std::span(served->data + 7, 5)));
  EXPECT_EQ(target.events.offers, 0u);
}

TEST_F(TcpTargetTest, AnotherVersionIsToldBothVersions) {
  RawPeer peer = connect();
  Bytes hello = encoded(hello_of(), tcp::hello_bytes);
  hello[4] = std::byte{9};
  ASSERT_TRUE(peer.send(hello));
  EXPECT_EQ(peer.reply().status, Errc::version_mismatch);
  EXPECT_NE(peer.text.find('9'), std::string::npos) << peer.text;
  EXPECT_NE(peer.text.find(std::to_string(tcp::protocol_version)), std::string::npos) << peer.text;
  EXPECT_TRUE(peer.closed_within(2s));
}

TEST_F(TcpTargetTest, EveryMalformedRequestEndsItsConnectionOnly) {
  RawPeer bystander = connected();
  const auto with_byte = [](Bytes bytes, std::size_t place, int value) {
    bytes[place] = static_cast<std::byte>(value);
    return bytes;
  };
  const tcp::Descriptor piece{0, 10};
  const tcp::Descriptor empty{0, 0};
  const tcp::Descriptor huge{0, ~0ull};
  const std::array wrapping{tcp::Descriptor{0, ~0ull}, tcp::Descriptor{0, 11}};
  const Bytes fine = request_bytes(request_of(Op::read, 1, served->key, 1, 10), std::span(&piece, 1));
  const std::vector<Bytes> broken{
      with_byte(fine, 0, 4),                                                            // op recv
      with_byte(fine, 0, 200),                                                          // no op
      with_byte(fine, 2, 1),                                                            // bytes that must be zero
      with_byte(fine, 32, 11),                                                          // sum differs
      request_bytes(request_of(Op::read, 1, served->key, 1, 0), std::span(&empty, 1)),  // nothing described
      request_bytes(request_of(Op::read, 1, served->key, 0, 10)),                       // nothing describes it
      request_bytes(request_of(Op::read, 1, served->key, 1025, 1 << 20)),               // too many
      request_bytes(request_of(Op::read, 1, served->key, 0xffffffff, ~0ull)),           // far too many
      request_bytes(request_of(Op::read, 1, served->key, 1, 10), std::span(&huge, 1)),  // overflow
      request_bytes(request_of(Op::read, 1, served->key, 2, 10), wrapping),             // sum wraps around
      request_bytes(request_of(Op::send, 1, {}, 0, max_message_bytes + 1)),             // message too long
      request_bytes(request_of(Op::send, 1, {}, 1, 10), std::span(&piece, 1)),          // message with slices
      request_bytes(request_of(Op::read, tcp::goodbye_id, served->key, 1, 10), std::span(&piece, 1)),
  };
  for (std::size_t i = 0; i < broken.size(); ++i) {
    RawPeer peer = connected();
    ASSERT_TRUE(peer.send(broken[i]));
    EXPECT_TRUE(peer.closed_within(2s)) << "case " << i;
  }
  ASSERT_TRUE(bystander.send(fine));
  EXPECT_EQ(bystander.response().status, Errc::ok);
}

TEST_F(TcpTargetTest, AConnectionThatEndsAnywhereInARequestLeavesNothing) {
  const std::array pieces{tcp::Descriptor{0, 40}, tcp::Descriptor{100, 60}};
  const Bytes whole = encoded(hello_of(), tcp::hello_bytes) +
                      request_bytes(request_of(Op::write_imm, 1, served->key, 2, 100), pieces) + pattern(100, 1);
  for (std::size_t length = 0; length < whole.size(); ++length) {
    RawPeer peer = connect();
    peer.send(std::span(whole).first(length));
  }
  poll_for(20ms);
  EXPECT_EQ(target.events.offers, 0u) << "an incomplete write must not notify";
  EXPECT_EQ(target.port->progress(), Progress::idle);
  EXPECT_TRUE(target.port->release_region(served->key, false));
  EXPECT_EQ(target.port->next_wakeup(), TimePoint::max());
}

TEST_F(TcpTargetTest, GarbageHarmsNobodyAndCostsNoMemory) {
  RawPeer bystander = connected();
  const auto attack = [&](int connections) {
    for (int i = 0; i < connections; ++i) {
      RawPeer peer = connect();
      Bytes bytes(1 + random() % 3000);
      for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
      // A third is garbage from the start, a third after a valid hello, a third nearly a valid request.
      if (i % 3 > 0) bytes = encoded(hello_of(), tcp::hello_bytes) + bytes;
      if (i % 3 > 1) {
        const tcp::Descriptor piece{random() % 2000000, 1 + random() % 2000};
        Bytes request = request_bytes(request_of(static_cast<Op>(random() % 4), 1, served->key, 1, piece.length),
                                      std::span(&piece, 1));
        request[random() % request.size()] = static_cast<std::byte>(random());
        bytes = encoded(hello_of(), tcp::hello_bytes) + request + bytes;
      }
      peer.send(bytes);
    }
    poll_for(10ms);
  };
  attack(300);
  const std::size_t memory_before = resident_bytes();
  const std::size_t files_before = open_files();
  attack(3000);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  EXPECT_LT(resident_bytes(), memory_before + (8 << 20));
#else
  (void)memory_before;
#endif
  EXPECT_EQ(open_files(), files_before);
  const tcp::Descriptor piece{0, 10};
  ASSERT_TRUE(bystander.send(request_bytes(request_of(Op::read, 1, served->key, 1, 10), std::span(&piece, 1))));
  EXPECT_EQ(bystander.response().status, Errc::ok);
}

TEST_F(TcpTargetTest, StrangersDoNotKeepOthersOut) {
  std::vector<RawPeer> strangers;
  for (int i = 0; i < 400; ++i) {
    strangers.push_back(connect());
    target.poll();
  }
  poll_for(20ms);
  RawPeer peer = connected();
  EXPECT_TRUE(strangers.front().closed_within(1s)) << "the oldest must have gone";
  EXPECT_FALSE(strangers.back().closed_within(20ms)) << "the newest still has its time";
}

TEST_F(TcpTargetTest, AHelloThatDribblesForEverIsCutOff) {
  RawPeer peer = connect();
  const Bytes hello = encoded(hello_of(), tcp::hello_bytes);
  const TimePoint start = Clock::now();
  poll_for(10ms);
  EXPECT_LE(target.port->next_wakeup(), start + 6s);
  bool open = true;
  for (std::size_t i = 0; open && Clock::now() < start + 8s; ++i) {
    if (i < hello.size() - 1) open = peer.send(std::span(hello).subspan(i, 1));
    open = open && !peer.closed_within(300ms);
  }
  EXPECT_FALSE(open);
  EXPECT_GT(Clock::now() - start, 4s);
  EXPECT_EQ(target.port->next_wakeup(), TimePoint::max());
}

TEST_F(TcpTargetTest, AFenceEndsThatChannelsConnectionsAndNoOthers) {
  RawPeer first = connected(1);
  RawPeer second = connected(1);
  RawPeer other = connected(2);
  // A write that waits for the rest of its payload.
  const std::array pieces{tcp::Descriptor{0, 100000}};
  ASSERT_TRUE(first.send(request_bytes(request_of(Op::write, 1, served->key, 1, 100000), pieces) + pattern(500, 1)));
  poll_for(10ms);
  EXPECT_FALSE(target.port->release_region(served->key, false));
  RawPeer fence = connect();
  Hello hello = hello_of(1);
  hello.purpose = tcp::Purpose::fence;
  EXPECT_EQ(fence.greet(hello).status, Errc::ok);
  EXPECT_TRUE(target.port->release_region(served->key, false)) << "confirmed before it was true";
  EXPECT_TRUE(first.closed_within(1s));
  EXPECT_TRUE(second.closed_within(1s));
  EXPECT_FALSE(other.closed_within(20ms));
}

TEST_F(TcpTargetTest, AFenceNeedsTheChannelsToken) {
  RawPeer victim = connected(1);
  RawPeer fence = connect();
  Hello hello = hello_of(1);
  hello.purpose = tcp::Purpose::fence;
  hello.token[0] = std::byte{8};
  fence.greet(hello);
  EXPECT_FALSE(victim.closed_within(20ms));
}

TEST_F(TcpTargetTest, HeldBackMessagesAreBounded) {
  target.events.take_messages = false;
  RawPeer peer = connected();
  Bytes all;
  for (std::uint32_t id = 0; id < 129; ++id) {
    all = all + request_bytes(request_of(Op::send, id, {}, 0, 10)) + pattern(10, id);
  }
  ASSERT_TRUE(peer.send(std::span(all).first(all.size() * 128 / 129)));
  EXPECT_FALSE(peer.closed_within(20ms)) << "128 may wait";
  ASSERT_TRUE(peer.send(std::span(all).last(all.size() / 129)));
  const Response goodbye = peer.response();
  EXPECT_EQ(goodbye.id, tcp::goodbye_id);
  EXPECT_EQ(goodbye.status, Errc::resource_exhausted);
  EXPECT_TRUE(peer.closed_within(2s));
  target.events.take_messages = true;
  poll_for(5ms);
  EXPECT_TRUE(target.events.messages.empty()) << "nothing of a dropped connection may arrive";
}

TEST_F(TcpTargetTest, AcceptingPausesWhileThereAreNoDescriptors) {
  if (types_checked) GTEST_SKIP() << "UndefinedBehaviorSanitizer needs descriptors of its own";
  RawPeer peer = connect();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  const int next_fd = ::dup(0);
  ::close(next_fd);
  int lines = 0;
  set_log_sink([&](LogLevel level, std::string_view) { lines += level == LogLevel::warning; });
  const rlimit none{static_cast<rlim_t>(next_fd), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  for (const TimePoint limit = Clock::now() + 250ms; Clock::now() < limit;) target.poll();
  pollfd waiting{target.port->wait_fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&waiting, 1, 0), 0) << "an owner that sleeps on wait_fd would spin";
  EXPECT_LE(target.port->next_wakeup(), Clock::now() + 200ms);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  set_log_sink({});
  EXPECT_EQ(lines, 1) << "said once, however often it was tried";
  EXPECT_EQ(peer.greet(hello_of()).status, Errc::ok) << "accepted once there is room";
}

TEST(TcpTransportTest, RegistersHostMemoryOnly) {
  const auto transport = make_tcp_transport({});
  RegionRecord region;
  region.name = "kv";
  EXPECT_TRUE(transport->register_region(region));
  region.kind = MemoryKind::cuda;
  EXPECT_EQ(transport->register_region(region).status(), Errc::unsupported);
}

TEST(TcpTransportTest, AHostThatIsNotThisOnesCanNotBeListenedOn) {
  RegionTable regions;
  Recorder events;
  PortContext context;
  context.regions = &regions;
  for (const char* host : {"203.0.113.77", "not-numeric.example"}) {
    context.listen_host = host;
    const auto port = make_tcp_transport({})->open_port(context, events);
    ASSERT_FALSE(port.is_ok()) << host;
    EXPECT_NE(port.status().text().find(host), std::string::npos) << port.status().text();
  }
}

// ---- the initiator under test, the target by hand

class TcpInitiatorTest : public testing::Test {
 protected:
  TcpInitiatorTest() : initiator(tcp_param(1), 5), local(initiator.add_region("local", 1 << 20)) {
    auto listening = tcp::listen_on("127.0.0.1", {});
    listener = std::move(listening->first);
    address = listening->second.text();
    remote.size = 1 << 20;
  }
  ChannelId begin_open() {
    const auto opened = initiator.port->open({address, "127.0.0.1", good_token(), incarnation, Clock::now() + 3s});
    EXPECT_TRUE(opened) << opened.status().to_string();
    return *opened;
  }
  RawPeer accept() {
    int fd = -1;
    for (const TimePoint limit = Clock::now() + 5s; fd < 0 && Clock::now() < limit;) {
      initiator.poll();
      fd = ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC);
    }
    EXPECT_GE(fd, 0);
    return {Fd(fd), [this] { initiator.poll(); }};
  }
  /// A channel whose target is the returned peer.
  RawPeer open() {
    channel = begin_open();
    RawPeer peer = accept();
    EXPECT_TRUE(tcp::decode_hello(peer.receive(tcp::hello_bytes).data()));
    peer.send(encoded(HelloReply{}, tcp::hello_reply_bytes));
    EXPECT_TRUE(step_until([&] { return !initiator.events.up.empty(); }));
    return peer;
  }
  template <class Predicate>
  bool step_until(Predicate&& done) {
    for (const TimePoint limit = Clock::now() + 10s; !done();) {
      if (Clock::now() > limit) return false;
      initiator.poll();
    }
    return true;
  }
  WorkItem item(Op op, const Slice& slice) {
    WorkItem work;
    work.op = op;
    work.cookie = ++last_cookie;
    work.local = local.get();
    work.remote = &remote;
    work.slices = {&slice, 1, 0, slice.length};
    EXPECT_EQ(initiator.port->post(channel, std::span(&work, 1)), 1u);
    return work;
  }
  Request receive_request(RawPeer& peer) {
    const Bytes raw = peer.receive(tcp::request_bytes);
    const auto request = tcp::decode_request(raw.data());
    EXPECT_TRUE(request);
    peer.receive(request->descriptors * tcp::descriptor_bytes);
    return *request;
  }

  Side initiator;
  std::shared_ptr<const RegionRecord> local;
  Fd listener;
  std::string address;
  RemoteRegion remote;
  ChannelId channel = 0;
  std::uint64_t last_cookie = 0;
};

TEST_F(TcpInitiatorTest, ResponsesAreUnderstoodHoweverTheirBytesAreCut) {
  RawPeer peer = open();
  const Slice slice{10, 20, 6000};
  const WorkItem work = item(Op::read, slice);
  const Request request = receive_request(peer);
  const Bytes payload = pattern(6000, 4);
  peer.dribble(encoded(Response{request.id, Errc::ok, 0, 6000}, tcp::response_bytes) + payload);
  ASSERT_TRUE(step_until([&] { return initiator.completions.contains(work.cookie); }));
  EXPECT_TRUE(initiator.completions[work.cookie]);
  EXPECT_TRUE(std::ranges::equal(payload, std::span(local->data + 10, 6000)));
}

TEST_F(TcpInitiatorTest, TheRestOfACancelledReadIsThrownAway) {
  RawPeer peer = open();
  const Slice slice{0, 0, 200000};
  const WorkItem first = item(Op::read, slice);
  const Request request = receive_request(peer);
  const Bytes payload = pattern(200000, 4);
  const Bytes response = encoded(Response{request.id, Errc::ok, 0, 200000}, tcp::response_bytes) + payload;
  ASSERT_TRUE(peer.send(std::span(response).first(50000)));
  ASSERT_TRUE(step_until([&] { return local->data[40000] == payload[40000]; }));
  initiator.port->cancel(channel, first.cookie);
  initiator.poll();
  EXPECT_EQ(initiator.completions.at(first.cookie), Errc::cancelled);
  std::memset(local->data, 0x5a, local->size);
  ASSERT_TRUE(peer.send(std::span(response).subspan(50000)));
  const Slice next{0, 0, 3};
  const WorkItem second = item(Op::read, next);
  const Request again = receive_request(peer);
  ASSERT_TRUE(peer.send(encoded(Response{again.id, Errc::ok, 0, 3}, tcp::response_bytes) + pattern(3, 1)));
  ASSERT_TRUE(step_until([&] { return initiator.completions.contains(second.cookie); }));
  EXPECT_TRUE(initiator.completions[second.cookie]);
  EXPECT_TRUE(std::ranges::equal(pattern(3, 1), std::span(local->data, 3)));
  EXPECT_TRUE(
      std::ranges::all_of(std::span(local->data + 3, 300000), [](std::byte b) { return b == std::byte{0x5a}; }));
}

TEST_F(TcpInitiatorTest, AnErrorOfTheTargetKeepsItsCodeAndText) {
  RawPeer peer = open();
  const Slice slice{0, 0, 100};
  const WorkItem work = item(Op::read, slice);
  const Request request = receive_request(peer);
  const std::string text = "somewhere else";
  Bytes raw(text.size());
  std::memcpy(raw.data(), text.data(), text.size());
  peer.send(encoded(Response{request.id, Errc::out_of_bounds, static_cast<std::uint16_t>(text.size()), 0},
                    tcp::response_bytes) +
            raw);
  ASSERT_TRUE(step_until([&] { return initiator.completions.contains(work.cookie); }));
  const Status& status = initiator.completions[work.cookie];
  EXPECT_EQ(status, Errc::out_of_bounds);
  EXPECT_NE(status.text().find(text), std::string::npos) << status.text();
  EXPECT_NE(status.text().find(address), std::string::npos) << status.text();
}

TEST_F(TcpInitiatorTest, EveryMalformedResponseEndsTheChannel) {
  const Slice slice{0, 0, 100};
  using Spoil = std::function<Bytes(const Request&)>;
  const std::vector<Spoil> spoils{
      [](const Request& r) {
        return encoded(Response{r.id + 1, Errc::ok, 0, 100}, tcp::response_bytes);
      },
      [](const Request& r) {
        return encoded(Response{r.id ^ 0x10000, Errc::ok, 0, 100}, tcp::response_bytes);
      },
      [](const Request& r) {
        return encoded(Response{r.id, Errc::ok, 0, 101}, tcp::response_bytes);
      },
      [](const Request& r) {
        return encoded(Response{r.id, Errc::ok, 3, 100}, tcp::response_bytes);
      },
      [](const Request& r) {
        return encoded(Response{r.id, Errc::internal, 600, 0}, tcp::response_bytes);
      },
      [](const Request& r) {
        return encoded(Response{r.id, static_cast<Errc>(999), 0, 0}, tcp::response_bytes);
      },
      [](const Request& r) {
        return encoded(Response{r.id, Errc::corrupted, 0, 5}, tcp::response_bytes);
      },
  };
  for (std::size_t i = 0; i < spoils.size(); ++i) {
    initiator.events.up.clear();
    RawPeer peer = open();
    const WorkItem work = item(Op::read, slice);
    peer.send(spoils[i](receive_request(peer)));
    ASSERT_TRUE(step_until([&] { return initiator.events.down.contains(channel); })) << "case " << i;
    EXPECT_NE(initiator.events.down[channel].text().find("malformed"), std::string::npos);
    EXPECT_EQ(initiator.completions.at(work.cookie), Errc::channel_error);
  }
}

TEST_F(TcpInitiatorTest, AGoodbyeGivesTheReason) {
  RawPeer peer = open();
  const std::string text = "closing time";
  Bytes raw(text.size());
  std::memcpy(raw.data(), text.data(), text.size());
  peer.send(encoded(Response{tcp::goodbye_id, Errc::shutting_down, static_cast<std::uint16_t>(text.size()), 0},
                    tcp::response_bytes) +
            raw);
  ASSERT_TRUE(step_until([&] { return initiator.events.down.contains(channel); }));
  EXPECT_NE(initiator.events.down[channel].text().find(text), std::string::npos);
}

TEST_F(TcpInitiatorTest, ATargetOfAnotherVersionIsAMismatch) {
  const ChannelId opening = begin_open();
  RawPeer peer = accept();
  peer.receive(tcp::hello_bytes);
  peer.send(encoded(HelloReply{7, Errc::ok, 0}, tcp::hello_reply_bytes));
  ASSERT_TRUE(step_until([&] { return initiator.events.down.contains(opening); }));
  const Status& why = initiator.events.down[opening];
  EXPECT_EQ(why, Errc::version_mismatch);
  EXPECT_NE(why.text().find('7'), std::string::npos) << why.text();
}

TEST_F(TcpInitiatorTest, NobodyListeningIsSaidAtOnceWithTheAddress) {
  listener.reset();
  const TimePoint start = Clock::now();
  const ChannelId opening = begin_open();
  ASSERT_TRUE(step_until([&] { return initiator.events.down.contains(opening); }));
  EXPECT_LT(Clock::now() - start, 2s);
  const Status& why = initiator.events.down[opening];
  EXPECT_EQ(why, Errc::unreachable);
  EXPECT_NE(why.text().find(address), std::string::npos) << why.text();
  EXPECT_NE(why.text().find("refused"), std::string::npos) << why.text();
}

TEST_F(TcpInitiatorTest, AWriteCompletesOnlyWhenTheFenceIsConfirmed) {
  RawPeer peer = open();
  const Slice slice{0, 0, 1000};
  const WorkItem write = item(Op::write, slice);
  const WorkItem read = item(Op::read, slice);
  receive_request(peer);
  initiator.port->fence(channel, {Errc::timed_out, "deadline"});
  initiator.poll();
  EXPECT_TRUE(initiator.completions.contains(read.cookie)) << "a read is quiet at once";
  RawPeer asked = accept();
  const auto hello = tcp::decode_hello(asked.receive(tcp::hello_bytes).data());
  ASSERT_TRUE(hello);
  EXPECT_EQ(hello->purpose, tcp::Purpose::fence);
  EXPECT_EQ(hello->token, good_token());
  EXPECT_FALSE(initiator.completions.contains(write.cookie));
  asked.send(encoded(HelloReply{}, tcp::hello_reply_bytes));
  ASSERT_TRUE(step_until([&] { return initiator.completions.contains(write.cookie); }));
  EXPECT_EQ(initiator.completions[write.cookie], Errc::channel_error);
  EXPECT_NE(initiator.completions[write.cookie].text().find("deadline"), std::string::npos);
}

// ---- two real sides

class TcpPairTest : public testing::Test {
 protected:
  static void read_everything(const std::string& listen_host, const std::string& host) {
    Side target(tcp_param(), incarnation);
    target.port.reset();
    target.context.listen_host = listen_host;
    target.open_port();
    target.events.sessions[good_token()] = session;
    Side initiator(tcp_param(), 5);
    const auto local = initiator.add_region("local", 100000);
    const auto served = target.add_region("served", 100000);
    std::ranges::copy(pattern(100000, 3), served->data);
    const RemoteRegion remote = target.remote_view(*served);
    const auto opened =
        initiator.port->open({target.port->address(), host, good_token(), incarnation, Clock::now() + 3s});
    ASSERT_TRUE(opened) << opened.status().to_string();
    const Slice slice{0, 0, 100000};
    WorkItem work;
    work.cookie = 1;
    work.local = local.get();
    work.remote = &remote;
    work.slices = {&slice, 1, 0, 100000};
    bool posted = false;
    for (const TimePoint limit = Clock::now() + 5s; initiator.completions.empty() && Clock::now() < limit;) {
      if (!posted) posted = initiator.port->post(*opened, std::span(&work, 1)) == 1;
      initiator.poll();
      target.poll();
    }
    ASSERT_TRUE(initiator.completions.contains(1));
    EXPECT_TRUE(initiator.completions[1]) << initiator.completions[1].to_string();
    EXPECT_TRUE(std::ranges::equal(pattern(100000, 3), std::span(local->data, 100000)));
  }
  static bool have_ipv6() {
    Fd fd(::socket(AF_INET6, SOCK_STREAM, 0));
    sockaddr_in6 loopback{};
    loopback.sin6_family = AF_INET6;
    loopback.sin6_addr = IN6ADDR_LOOPBACK_INIT;
    return fd && ::bind(fd.get(), reinterpret_cast<sockaddr*>(&loopback), sizeof loopback) == 0;
  }
};

TEST_F(TcpPairTest, AWildcardAddressIsReachedAtTheHostThatIsKnown) { read_everything("0.0.0.0", "127.0.0.1"); }

TEST_F(TcpPairTest, LocalhostIsUnderstood) { read_everything("localhost", "elsewhere"); }

TEST_F(TcpPairTest, Ipv6Works) {
  if (!have_ipv6()) GTEST_SKIP() << "this machine has no IPv6";
  read_everything("::1", "elsewhere");
  read_everything("[::1]", "elsewhere");
  read_everything("::", "::1");
  read_everything("::", "[::1]");
}

TEST_F(TcpPairTest, AKilledTargetEndsEverythingSoon) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    Side target(tcp_param(), incarnation);
    target.events.sessions[good_token()] = session;
    const auto served = target.add_region("served", 1 << 20);
    std::string address = target.port->address();
    address.resize(64);
    (void)!::write(pipe[1], address.data(), address.size());
    (void)!::write(pipe[1], &served->key, sizeof served->key);
    // Greets and reads a little, then does nothing more until it is killed.
    for (const TimePoint limit = Clock::now() + 200ms; Clock::now() < limit;) target.poll();
    for (;;) ::pause();
  }
  std::string address(64, '\0');
  RemoteRegion remote;
  ASSERT_EQ(::read(pipe[0], address.data(), address.size()), 64);
  ASSERT_EQ(::read(pipe[0], &remote.key, sizeof remote.key), static_cast<ssize_t>(sizeof remote.key));
  ::close(pipe[0]);
  ::close(pipe[1]);
  remote.size = 1 << 20;

  Side initiator(tcp_param(), 5);
  const auto local = initiator.add_region("local", 1 << 20);
  const auto opened =
      initiator.port->open({std::string(address.c_str()), "127.0.0.1", good_token(), incarnation, Clock::now() + 3s});
  ASSERT_TRUE(opened);
  const auto poll_until = [&](auto&& done) {
    for (const TimePoint limit = Clock::now() + 5s; !done() && Clock::now() < limit;) initiator.poll();
    return done();
  };
  ASSERT_TRUE(poll_until([&] { return !initiator.events.up.empty(); }));
  std::this_thread::sleep_for(250ms);
  const Slice slice{0, 0, 100000};
  std::vector<WorkItem> items;
  for (std::uint64_t i = 1; i <= 8; ++i) {
    WorkItem work;
    work.op = i % 2 == 0 ? Op::read : Op::write;
    work.cookie = i;
    work.local = local.get();
    work.remote = &remote;
    work.slices = {&slice, 1, 0, slice.length};
    items.push_back(work);
  }
  ASSERT_EQ(initiator.port->post(*opened, items), items.size());
  for (int i = 0; i < 100; ++i) initiator.poll();
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  const TimePoint killed = Clock::now();
  EXPECT_TRUE(poll_until([&] { return initiator.completions.size() == items.size(); }));
  EXPECT_LT(Clock::now() - killed, 1s) << "the kernel tells at once";
  EXPECT_TRUE(initiator.events.down.contains(*opened));
  for (const auto& [cookie, status] : initiator.completions)
    EXPECT_EQ(status, Errc::channel_error) << status.to_string();
}

}  // namespace
}  // namespace kvferry::test
