// Writes KV blocks into another process's memory and tells it when they are there.
//   kvferry_write --serve tcp://0.0.0.0:7000     offers memory until a writer has filled it
//   kvferry_write --connect tcp://HOST:7000      writes
//   kvferry_write                                does both, in two processes of this host
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/actors/engine.hpp>

using namespace std::chrono_literals;

constexpr std::uint64_t block_bytes = 64 << 10;
constexpr std::uint64_t block_count = 64;

/// What block i is filled with.
std::byte mark(std::uint64_t block) { return std::byte(block + 1); }

int serve(const std::string& listen, const std::function<void(const std::string&)>& tell_address) {
  auto engine = kvferry::Engine::start({.name = "decode-0", .listen = listen}).value();
  auto kv = engine.allocate("kv", block_count * block_bytes, {.access = kvferry::Access::write}).value();
  tell_address(engine.address());

  // The immediate comes after all the data it speaks of is visible here.
  auto arrival = engine.next_notification(10min).value();
  for (std::uint64_t i = 0; i < arrival.immediate; ++i) {
    const auto block = kv.bytes().subspan(i * block_bytes, block_bytes);
    if (std::any_of(block.begin(), block.end(), [&](std::byte b) { return b != mark(i); })) {
      std::fprintf(stderr, "block %llu is wrong\n", static_cast<unsigned long long>(i));
      return 1;
    }
  }
  std::printf("server: %u blocks arrived from %s, all right\n", arrival.immediate, arrival.peer.c_str());
  // The writer leaves first: to it, a server that goes before looks like one that was lost.
  while (!engine.peers().empty()) std::this_thread::sleep_for(1ms);
  return 0;
}

int write_blocks(const std::string& address) {
  auto engine = kvferry::Engine::start({.name = "prefill-0"}).value();
  auto peer = engine.connect(address).value();

  // Memory that the program owns already can be used as well as memory that the engine allocates.
  std::vector<std::byte> memory(block_count * block_bytes);
  auto kv = engine.register_memory("kv", memory.data(), memory.size()).value();
  std::vector<kvferry::Slice> slices;
  for (std::uint64_t i = 0; i < block_count; ++i) {
    std::fill_n(memory.data() + i * block_bytes, block_bytes, mark(i));
    slices.push_back({i * block_bytes, i * block_bytes, block_bytes});
  }
  const auto begin = std::chrono::steady_clock::now();
  const kvferry::Transfer transfer = engine.write_imm(peer, kv, "kv", slices, block_count, {.deadline = 5s});
  const kvferry::Status status = transfer.wait();
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
  if (!status) throw kvferry::StatusError(status);
  std::printf("writer: %zu blocks of %llu KiB to %s in %.0f us (%s)\n", slices.size(),
              static_cast<unsigned long long>(block_bytes >> 10), peer.name().c_str(), taken.count(),
              peer.describe().c_str());
  // The region goes before the memory does.
  const kvferry::Status gone = engine.unregister_region(kv);
  return gone ? 0 : throw kvferry::StatusError(gone);
}

/// The server as a child process, which tells its address through a pipe.
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
  const int result = write_blocks(address);
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
  if (role == "--connect" && argc == 3) return write_blocks(argv[2]);
  std::fprintf(stderr, "usage: %s [--serve [tcp://HOST:PORT] | --connect tcp://HOST:PORT]\n", argv[0]);
  return 2;
} catch (const kvferry::StatusError& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
