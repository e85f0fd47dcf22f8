// Reads KV blocks out of another process's memory.
//   kvferry_read --serve tcp://0.0.0.0:7000      holds the blocks until a reader has had them
//   kvferry_read --connect tcp://HOST:7000       reads them and looks whether they are right
//   kvferry_read                                 does both, in two processes of this host
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
  auto engine = kvferry::Engine::start({.name = "prefill-0", .listen = listen}).value();
  auto kv = engine.allocate("kv", block_count * block_bytes).value();
  for (std::uint64_t i = 0; i < block_count; ++i) std::fill_n(kv.data() + i * block_bytes, block_bytes, mark(i));
  tell_address(engine.address());
  auto done = engine.next_notification(10min).value();
  std::printf("server: %s has read its blocks\n", done.peer.c_str());
  // The reader leaves first: to it, a server that goes before looks like one that was lost.
  while (!engine.peers().empty()) std::this_thread::sleep_for(1ms);
  return 0;
}

int read_blocks(const std::string& address) {
  auto engine = kvferry::Engine::start({.name = "decode-0"}).value();
  auto kv = engine.allocate("kv", block_count * block_bytes).value();
  auto peer = engine.connect(address).value();

  // Every second remote block, packed one after the other at this side: one transfer, many slices.
  std::vector<kvferry::Slice> slices;
  for (std::uint64_t i = 0; i < block_count / 2; ++i) {
    slices.push_back({i * block_bytes, 2 * i * block_bytes, block_bytes});
  }
  const auto begin = std::chrono::steady_clock::now();
  const kvferry::Status status = engine.read(peer, kv, "kv", slices, {.deadline = 5s}).wait();
  const std::chrono::duration<double, std::micro> taken = std::chrono::steady_clock::now() - begin;
  if (!status) throw kvferry::StatusError(status);

  for (const kvferry::Slice& slice : slices) {
    const std::byte expected = mark(slice.remote_offset / block_bytes);
    const auto block = kv.bytes().subspan(slice.local_offset, slice.length);
    if (std::any_of(block.begin(), block.end(), [&](std::byte b) { return b != expected; })) {
      std::fprintf(stderr, "the block at %llu is wrong\n", static_cast<unsigned long long>(slice.remote_offset));
      return 1;
    }
  }
  std::printf("reader: %zu blocks of %llu KiB from %s in %.0f us, all right (%s)\n", slices.size(),
              static_cast<unsigned long long>(block_bytes >> 10), peer.name().c_str(), taken.count(),
              peer.describe().c_str());
  // A notification without data: the server may go.
  const kvferry::Status said = engine.write_imm(peer, kv, "kv", {}, 1).wait();
  return said ? 0 : throw kvferry::StatusError(said);
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
  const int result = read_blocks(address);
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
  if (role == "--connect" && argc == 3) return read_blocks(argv[2]);
  std::fprintf(stderr, "usage: %s [--serve [tcp://HOST:PORT] | --connect tcp://HOST:PORT]\n", argv[0]);
  return 2;
} catch (const kvferry::StatusError& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
