#include "bench/kv_model.hpp"

#include <array>
#include <string>

#include <fmt/core.h>

namespace kvferry::bench {
namespace {

constexpr std::array models = {
    KvModel{"llama-3.1-8b", 32, 2, 8 * 128, 2, 16},
    KvModel{"llama-3.1-70b-tp8", 80, 2, 1 * 128, 2, 16},
    KvModel{"qwen3-32b", 64, 2, 8 * 128, 2, 16},
    KvModel{"deepseek-v3", 61, 1, 512 + 64, 2, 64},
};

}  // namespace

std::span<const KvModel> known_models() noexcept { return models; }

Result<KvModel> find_model(std::string_view name) {
  std::string names;
  for (const KvModel& model : models) {
    if (model.name == name) return model;
    names += (names.empty() ? "" : ", ") + std::string(model.name);
  }
  return Status(Errc::invalid_argument, fmt::format("'{}' is not a known model; known are {}", name, names));
}

}  // namespace kvferry::bench
