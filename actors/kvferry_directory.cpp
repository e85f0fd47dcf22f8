// kvferry-directory: where engines find each other. Runs until SIGINT or SIGTERM.
#include <csignal>
#include <iostream>
#include <string>
#include <string_view>

#include <kvferry/actors/directory.hpp>

namespace {

constexpr std::string_view usage =
    "usage: kvferry-directory [--listen tcp://HOST:PORT]\n"
    "\n"
    "Maps the names of engines to their addresses. --listen: where, by default tcp://127.0.0.1:7717; port 0 takes a "
    "free\n"
    "one. Prints the address that it listens on, and ends with SIGINT or SIGTERM. docs/directory.md says more.\n";

}  // namespace

int main(int argc, char** argv) {
  std::string listen = "tcp://127.0.0.1:7717";
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    if (argument == "--help" || argument == "-h") {
      std::cout << usage;
      return 0;
    }
    if (argument.starts_with("--listen=")) {
      listen = argument.substr(9);
    } else if (argument == "--listen" && i + 1 < argc) {
      listen = argv[++i];
    } else {
      std::cerr << "kvferry-directory: unknown argument " << argument << '\n' << usage;
      return 2;
    }
  }
  // Blocked before any thread starts, so that the signals wait for this one.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  const auto server = kvferry::DirectoryServer::start(listen);
  if (!server) {
    std::cerr << "kvferry-directory: " << server.status().to_string() << '\n';
    return 1;
  }
  std::cout << "kvferry-directory listens on " << (*server).address() << std::endl;
  int signal = 0;
  sigwait(&signals, &signal);
  return 0;
}
