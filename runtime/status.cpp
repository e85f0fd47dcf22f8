#include <kvferry/runtime/status.hpp>

namespace kvferry {

std::string_view to_string(Errc code) noexcept {
  switch (code) {
    case Errc::ok:
      return "ok";
    case Errc::invalid_argument:
      return "invalid_argument";
    case Errc::timed_out:
      return "timed_out";
    case Errc::cancelled:
      return "cancelled";
    case Errc::peer_lost:
      return "peer_lost";
    case Errc::stale_peer:
      return "stale_peer";
    case Errc::unknown_region:
      return "unknown_region";
    case Errc::out_of_bounds:
      return "out_of_bounds";
    case Errc::access_denied:
      return "access_denied";
    case Errc::corrupted:
      return "corrupted";
    case Errc::no_path:
      return "no_path";
    case Errc::already_exists:
      return "already_exists";
    case Errc::address_in_use:
      return "address_in_use";
    case Errc::unreachable:
      return "unreachable";
    case Errc::version_mismatch:
      return "version_mismatch";
    case Errc::too_large:
      return "too_large";
    case Errc::resource_exhausted:
      return "resource_exhausted";
    case Errc::channel_error:
      return "channel_error";
    case Errc::shutting_down:
      return "shutting_down";
    case Errc::unsupported:
      return "unsupported";
    case Errc::malformed:
      return "malformed";
    case Errc::internal:
      return "internal";
  }
  return "unknown_error";  // a code that a newer peer sent
}

Status::Status(Errc code, std::string text) : code_(code) {
  if (code != Errc::ok && !text.empty()) text_ = std::make_shared<const std::string>(std::move(text));
}

std::string Status::to_string() const {
  std::string line(kvferry::to_string(code_));
  if (text_) line.append(": ").append(*text_);
  return line;
}

Status Status::with_context(std::string_view where) const {
  if (is_ok()) return *this;
  std::string line(where);
  if (text_) line.append(": ").append(*text_);
  return {code_, std::move(line)};
}

}  // namespace kvferry
