#include <algorithm>
#include <iostream>

#include <kvferry/actors/engine.hpp>

int main() {
  using namespace kvferry;
  try {
    Engine prefill = Engine::start({.name = "prefill-0"}).value();  // listens on a free port of 127.0.0.1
    Region source = prefill.allocate("kv", 1 << 20).value();
    std::ranges::fill(source.bytes(), std::byte{42});

    Engine decode = Engine::start({.name = "decode-0"}).value();
    Region sink = decode.allocate("kv", 1 << 20).value();
    Peer peer = decode.connect(prefill.address()).value();
    const Slice slices[] = {{.local_offset = 0, .remote_offset = 65536, .length = 16384}};
    Status status = decode.read(peer, sink, "kv", slices).wait();

    std::cout << "read from " << peer.name() << ": " << status.to_string() << '\n';
    return status.is_ok() && std::ranges::count(sink.bytes(), std::byte{42}) == 16384 ? 0 : 1;
  } catch (const StatusError& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
