#include <algorithm>

#include <fmt/format.h>
#include <zmq.hpp>

#include <kvferry/actors/directory_lines.hpp>
#include <kvferry/runtime/log.hpp>

namespace kvferry {

struct DirectoryLines::Sockets {
  zmq::context_t context{1};
  std::vector<zmq::socket_t> dealers;
};

DirectoryLines::DirectoryLines(std::vector<std::string> addresses)
    : addresses_(std::move(addresses)), sockets_(std::make_unique<Sockets>()) {
  sockets_->dealers.resize(addresses_.size());
}

DirectoryLines::~DirectoryLines() = default;

void DirectoryLines::close() {
  for (zmq::socket_t& dealer : sockets_->dealers) dealer = zmq::socket_t();
}

void DirectoryLines::ask(std::size_t first, std::size_t count, const std::vector<DirectoryBody>& questions,
                         Duration limit, const Enough& enough) {
  const TimePoint until = Clock::now() + limit;
  const std::uint64_t first_id = next_id_;
  next_id_ += questions.size();
  std::vector<zmq::pollitem_t> items;
  std::vector<std::size_t> open(count, 0);  // questions without an answer, by directory
  for (std::size_t i = 0; i < count; ++i) {
    zmq::socket_t& dealer = sockets_->dealers[first + i];
    try {
      if (!dealer) {
        dealer = zmq::socket_t(sockets_->context, ZMQ_DEALER);
        dealer.set(zmq::sockopt::linger, 0);
        dealer.set(zmq::sockopt::ipv6, addresses_[first + i].find('[') != std::string::npos);
        dealer.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(max_directory_answer));
        dealer.set(zmq::sockopt::reconnect_ivl, 50);
        dealer.set(zmq::sockopt::reconnect_ivl_max, 1000);
        dealer.set(zmq::sockopt::sndhwm, 100000);
        dealer.connect(addresses_[first + i]);
      }
      for (std::size_t question = 0; question < questions.size(); ++question) {
        const std::string bytes = encode(DirectoryMessage{first_id + question, questions[question]});
        open[i] += dealer.send(zmq::buffer(bytes), zmq::send_flags::dontwait).has_value() ? 1 : 0;
      }
    } catch (const zmq::error_t& e) {
      log(LogLevel::warning, fmt::format("directory {}: {}", addresses_[first + i], e.what()));
      dealer = zmq::socket_t();
      open[i] = 0;
    }
    items.push_back({dealer ? dealer.handle() : nullptr, -1, static_cast<short>(dealer ? ZMQ_POLLIN : 0), 0});
  }
  std::erase_if(items, [](const zmq::pollitem_t& item) { return item.events == 0; });
  while (std::any_of(open.begin(), open.end(), [](std::size_t left) { return left > 0; })) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now());
    if (left.count() <= 0 || items.empty()) return;
    zmq::poll(items, left);
    for (std::size_t i = 0; i < count; ++i) {
      zmq::socket_t& dealer = sockets_->dealers[first + i];
      zmq::message_t bytes;
      while (dealer && dealer.recv(bytes, zmq::recv_flags::dontwait)) {
        auto message = decode_directory_message({static_cast<const std::byte*>(bytes.data()), bytes.size()});
        // What answers an earlier question comes too late; id 0 is about a message that could not be read.
        if (!message || (message->id != 0 && (message->id < first_id || message->id - first_id >= questions.size())))
          continue;
        const std::size_t question = message->id == 0 ? 0 : message->id - first_id;
        if (open[i] > 0) --open[i];
        if (enough(first + i, question, std::move(message->body))) return;
      }
    }
  }
}

}  // namespace kvferry
