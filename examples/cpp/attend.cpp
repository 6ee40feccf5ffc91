// Runs a MultiheadAttention that Python trained.
//
//   torch.save(dict(attention.state_dict()), "attention.pt")
//   torch.save({"query": x, "key": x, "value": x, "key_padding_mask": padding}, "inputs.pt")
//   attend attention.pt inputs.pt outputs.pt num_heads=8 batch_first=1
//   output, weights = torch.load("outputs.pt")  # weights per head
//
// What the shapes in the checkpoint do not tell is said by name=value, with the names and defaults
// of Python's constructor: num_heads (required), kernel=dot|rbf (where there are no frequencies),
// p=<number>|None, add_zero_attn, batch_first.
#include <ikattn/multihead_attention.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <tuple>

namespace {

using State = torch::OrderedDict<std::string, torch::Tensor>;
using Settings = std::map<std::string, std::string>;

Settings parse_settings(int count, char** arguments) {
  Settings settings{{"kernel", "dot"}, {"p", "2"}, {"add_zero_attn", "0"}, {"batch_first", "0"}};
  for (int i = 0; i < count; ++i) {
    const std::string setting = arguments[i];
    const auto equals = setting.find('=');
    const auto name = setting.substr(0, equals);
    TORCH_CHECK(equals != std::string::npos && (name == "num_heads" || settings.contains(name)),
                "settings are name=value, with a name of Python's constructor, got ", setting);
    settings[name] = setting.substr(equals + 1);
  }
  TORCH_CHECK(settings.contains("num_heads"), "num_heads=<number> must be given");
  return settings;
}

ikattn::nn::MultiheadAttentionOptions options_for(const State& state, const Settings& settings) {
  using ikattn::nn::Kernel;
  const auto E = state["out_proj.weight"].size(0);
  ikattn::nn::MultiheadAttentionOptions options(E, std::stoll(settings.at("num_heads")));
  options.bias(state.contains("in_proj_bias"))
      .add_bias_kv(state.contains("bias_k"))
      .add_zero_attn(settings.at("add_zero_attn") == "1")
      .batch_first(settings.at("batch_first") == "1")
      .kernel(settings.at("kernel") == "rbf" ? Kernel::kRbf : Kernel::kDot);
  if (state.contains("k_proj_weight")) {
    options.kdim(state["k_proj_weight"].size(1)).vdim(state["v_proj_weight"].size(1));
  }
  if (state.contains("spectral.w1")) {
    options.kernel(Kernel::kImplicit)
        .num_frequencies(state["spectral.w1"].numel() / E)
        .stationary(!state.contains("spectral.w2"));
  }
  const auto& p = settings.at("p");
  options.p(p == "None" ? std::nullopt : std::optional(std::stod(p)));
  return options;
}

torch::Tensor find(const State& inputs, const std::string& name) {
  const auto* tensor = inputs.find(name);
  return tensor == nullptr ? torch::Tensor() : *tensor;
}

void run(int count, char** arguments) {
  TORCH_CHECK(count >= 4, "usage: attend attention.pt inputs.pt outputs.pt [name=value ...]");
  const auto state = ikattn::nn::read_state_dict(arguments[1]);
  const auto settings = parse_settings(count - 4, arguments + 4);
  ikattn::nn::MultiheadAttention attention(options_for(state, settings));
  attention->to(state["out_proj.weight"].scalar_type());
  ikattn::nn::load_state_dict(*attention, state);
  attention->eval();

  const torch::NoGradGuard no_grad;
  const auto inputs = ikattn::nn::read_state_dict(arguments[2]);
  const auto [output, weights] =
      attention(find(inputs, "query"), find(inputs, "key"), find(inputs, "value"),
                find(inputs, "key_padding_mask"), /*need_weights=*/true, find(inputs, "attn_mask"),
                /*average_attn_weights=*/false);
  const auto bytes = torch::pickle_save(std::make_tuple(output, weights));
  std::ofstream file(arguments[3], std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  TORCH_CHECK(file.flush(), "cannot write ", arguments[3]);
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(count, arguments);
  } catch (const std::exception& error) {
    const auto* torchs = dynamic_cast<const c10::Error*>(&error);  // without its backtrace
    std::fprintf(stderr, "attend: %s\n", torchs ? torchs->what_without_backtrace() : error.what());
    return 1;
  }
  return 0;
}
