// The forms in which a program waits for a transfer: a coroutine, a future, a callback. Each does every operation once:
// write, read, write with a notification, send and receive.
//   kvferry_forms --serve tcp://127.0.0.1:7000   offers memory and answers
//   kvferry_forms --connect tcp://HOST:7000      does the work
//   kvferry_forms                                does both, in two processes of this host
#include <algorithm>
#include <array>
#include <chrono>
#include <coroutine>
#include <cstdio>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/actors/engine.hpp>

using namespace std::chrono_literals;
using kvferry::Slice;
using kvferry::Status;
using kvferry::Transfer;

constexpr std::uint64_t block_bytes = 64 << 10;
constexpr std::uint32_t forms = 3;

/// What all forms work with: the first block of `kv` is written to the peer, the second read from it.
struct Session {
  kvferry::Engine& engine;
  kvferry::Peer peer;    ///< written, read and sent to
  kvferry::Peer sender;  ///< the same engine, as it sends to us
  kvferry::Region kv;
  std::array<Slice, 1> there = {Slice{0, 0, block_bytes}};
  std::array<Slice, 1> back = {Slice{block_bytes, 0, block_bytes}};
  std::array<std::byte, 64> answer{};

  Transfer write() { return engine.write(peer, kv, "kv", there); }
  Transfer read() { return engine.read(peer, kv, "kv", back); }
  Transfer notify(std::uint32_t form) { return engine.write_imm(peer, kv, "kv", there, form); }
  Transfer send(std::string_view text) { return engine.send(peer, std::as_bytes(std::span(text))); }
  Transfer receive() { return engine.recv(sender, answer); }
};

// ---------------------------------------------------------------- coroutine

/// The smallest coroutine type that does: it runs at once, and its outcome comes out as a future.
struct Task {
  struct promise_type {
    std::promise<Status> outcome;
    Task get_return_object() { return {outcome.get_future()}; }
    std::suspend_never initial_suspend() noexcept { return {}; }
    std::suspend_never final_suspend() noexcept { return {}; }
    void return_value(Status status) { outcome.set_value(std::move(status)); }
    void unhandled_exception() { outcome.set_exception(std::current_exception()); }
  };
  std::future<Status> outcome;
};

/// No thread waits: the rest runs on the engine's callback thread when a transfer has ended.
Task with_a_coroutine(Session& session) {
  if (Status status = co_await session.write(); !status) co_return status;
  if (Status status = co_await session.read(); !status) co_return status;
  if (Status status = co_await session.notify(0); !status) co_return status;
  if (Status status = co_await session.send("a coroutine"); !status) co_return status;
  co_return co_await session.receive();
}

// ---------------------------------------------------------------- future

/// A transfer as a std::future, for code that is built on these. Transfer::wait() is cheaper where that is all.
std::future<Status> as_future(const Transfer& transfer) {
  auto outcome = std::make_shared<std::promise<Status>>();
  auto future = outcome->get_future();
  // Setting a promise is short and does not block, so the completing thread may do it.
  transfer.on_complete([outcome](const Status& status) { outcome->set_value(status); }, kvferry::Dispatch::in_place);
  return future;
}

Status with_futures(Session& session) {
  if (Status status = as_future(session.write()).get(); !status) return status;
  if (Status status = as_future(session.read()).get(); !status) return status;
  if (Status status = as_future(session.notify(1)).get(); !status) return status;
  // Two at a time: the answer is expected before the question has gone.
  auto received = as_future(session.receive());
  auto sent = as_future(session.send("a future"));
  if (Status status = sent.get(); !status) return status;
  return received.get();
}

// ---------------------------------------------------------------- callback

/// Each end starts what comes next; the last, or the first that fails, says how it all went.
class WithCallbacks : public std::enable_shared_from_this<WithCallbacks> {
 public:
  explicit WithCallbacks(Session& session) : session_(session) {}

  std::future<Status> start() {
    after(session_.write(), &WithCallbacks::written);
    return outcome_.get_future();
  }

 private:
  using Step = void (WithCallbacks::*)();

  void written() { after(session_.read(), &WithCallbacks::read_back); }
  void read_back() { after(session_.notify(2), &WithCallbacks::notified); }
  void notified() { after(session_.send("a callback"), &WithCallbacks::sent); }
  void sent() { after(session_.receive(), &WithCallbacks::received); }
  void received() { outcome_.set_value({}); }

  void after(const Transfer& transfer, Step next) {
    transfer.on_complete([self = shared_from_this(), next](const Status& status) {
      if (status)
        (self.get()->*next)();
      else
        self->outcome_.set_value(status);
    });
  }

  Session& session_;
  std::promise<Status> outcome_;
};

// ---------------------------------------------------------------- the two sides

void require(const Status& status) {
  if (!status) throw kvferry::StatusError(status);
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string receive(kvferry::Engine& engine, const kvferry::Peer& peer) {
  std::array<std::byte, 256> buffer;
  const Transfer transfer = engine.recv(peer, buffer);
  require(transfer.wait());
  return text_of(std::span(buffer).first(transfer.bytes()));
}

int serve(const std::string& listen, const std::function<void(const std::string&)>& tell_address) {
  auto engine = kvferry::Engine::start({.name = "server", .listen = listen}).value();
  auto kv = engine.allocate("kv", block_bytes).value();
  tell_address(engine.address());
  auto worker = engine.accept("worker", 10min).value();
  // Sending takes a connection of one's own: the first message says where to.
  auto back = engine.connect(receive(engine, worker)).value();
  for (std::uint32_t form = 0; form < forms; ++form) {
    if (engine.next_notification(30s).value().immediate != form) return 1;
    const std::string answer = "done with " + receive(engine, worker);
    require(engine.send(back, std::as_bytes(std::span(answer))).wait());
  }
  return receive(engine, worker) == "goodbye" ? 0 : 1;
}

/// Gives the block new bytes, lets the form do its work and checks that they came back.
bool check(Session& session, unsigned char mark, const std::function<Status()>& work) {
  const auto bytes = session.kv.bytes();
  std::ranges::fill(bytes.first(block_bytes), std::byte{mark});
  require(work());
  // Zeroed before, and longer than any answer.
  std::printf("%s\n", reinterpret_cast<const char*>(session.answer.data()));
  session.answer.fill(std::byte{0});
  return std::ranges::count(bytes.subspan(block_bytes), std::byte{mark}) == block_bytes;
}

int work(const std::string& address) {
  auto engine = kvferry::Engine::start({.name = "worker"}).value();
  auto peer = engine.connect(address).value();
  const std::string own = engine.address();
  require(engine.send(peer, std::as_bytes(std::span(own))).wait());
  Session session{engine, peer, engine.accept("server", 5s).value(), engine.allocate("kv", 2 * block_bytes).value()};
  bool right = check(session, 1, [&] { return with_a_coroutine(session).outcome.get(); });
  right = check(session, 2, [&] { return with_futures(session); }) && right;
  right = check(session, 3, [&] { return std::make_shared<WithCallbacks>(session)->start().get(); }) && right;
  require(session.send("goodbye").wait());
  if (!right) std::fprintf(stderr, "the bytes that came back are not those that were written\n");
  return right ? 0 : 1;
}

/// The serving side as a child process, which tells its address through a pipe.
int run_both() {
  int ends[2];
  if (pipe(ends) != 0) return 1;
  const pid_t child = fork();
  if (child == 0) {
    return serve("tcp://127.0.0.1:0", [&](const std::string& address) {
      if (write(ends[1], address.data(), address.size()) < 0) std::perror("pipe");
      close(ends[1]);
    });
  }
  close(ends[1]);
  char address[256] = {};
  if (read(ends[0], address, sizeof address - 1) <= 0) return 1;
  const int result = work(address);
  int served = 0;
  waitpid(child, &served, 0);
  return served == 0 ? result : 1;
}

int main(int argc, char** argv) try {
  const std::string_view role = argc > 1 ? argv[1] : "";
  if (role.empty()) return run_both();
  if (role == "--serve" && argc <= 3) {
    return serve(argc > 2 ? argv[2] : "tcp://127.0.0.1:0", [](const std::string& address) {
      std::printf("serving at %s\n", address.c_str());
      std::fflush(stdout);
    });
  }
  if (role == "--connect" && argc == 3) return work(argv[2]);
  std::fprintf(stderr, "usage: %s [--serve [tcp://HOST:PORT] | --connect tcp://HOST:PORT]\n", argv[0]);
  return 2;
} catch (const kvferry::StatusError& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
