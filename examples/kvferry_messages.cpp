// Sends small messages to another process and gets them back: what a block table or a request travels in.
//   kvferry_messages --serve tcp://127.0.0.1:7000   answers until the other side says goodbye
//   kvferry_messages --connect tcp://HOST:7000      asks
//   kvferry_messages                                does both, in two processes of this host
#include <array>
#include <chrono>
#include <cstdio>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include <sys/wait.h>
#include <unistd.h>

#include <kvferry/actors/engine.hpp>

using namespace std::chrono_literals;

void send(kvferry::Engine& engine, const kvferry::Peer& peer, std::string_view text) {
  const kvferry::Status status = engine.send(peer, std::as_bytes(std::span(text)), {.deadline = 5s}).wait();
  if (!status) throw kvferry::StatusError(status);
}

std::string receive(kvferry::Engine& engine, const kvferry::Peer& peer) {
  std::array<std::byte, 1024> buffer;
  const kvferry::Transfer transfer = engine.recv(peer, buffer, {.deadline = 60s});
  const kvferry::Status status = transfer.wait();
  if (!status) throw kvferry::StatusError(status);
  return {reinterpret_cast<const char*>(buffer.data()), transfer.bytes()};
}

int serve(const std::string& listen, const std::function<void(const std::string&)>& tell_address) {
  auto engine = kvferry::Engine::start({.name = "answerer", .listen = listen}).value();
  tell_address(engine.address());
  auto asker = engine.accept("asker", 10min).value();
  // Sending takes a connection of one's own: the first message says where to.
  auto back = engine.connect(receive(engine, asker)).value();
  for (std::string question; (question = receive(engine, asker)) != "goodbye";) {
    send(engine, back, "you said: " + question);
  }
  return 0;
}

int ask(const std::string& address) {
  auto engine = kvferry::Engine::start({.name = "asker"}).value();
  auto peer = engine.connect(address).value();
  send(engine, peer, engine.address());
  auto answerer = engine.accept("answerer", 5s).value();
  for (const std::string question : {"which blocks do you hold?", "keep them for me"}) {
    send(engine, peer, question);
    const std::string answer = receive(engine, answerer);
    std::printf("%s\n", answer.c_str());
    if (answer != "you said: " + question) return 1;
  }
  send(engine, peer, "goodbye");
  return 0;
}

/// The answering side as a child process, which tells its address through a pipe.
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
  const int result = ask(address);
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
  if (role == "--connect" && argc == 3) return ask(argv[2]);
  std::fprintf(stderr, "usage: %s [--serve [tcp://HOST:PORT] | --connect tcp://HOST:PORT]\n", argv[0]);
  return 2;
} catch (const kvferry::StatusError& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
