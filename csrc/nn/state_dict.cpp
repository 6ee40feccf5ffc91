// state_dicts that Python wrote.
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import_read.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "ikattn/multihead_attention.h"

namespace ikattn::nn {

using at::Tensor;

torch::OrderedDict<std::string, Tensor> read_state_dict(const std::string& path) {
  caffe2::serialize::PyTorchStreamReader reader(path);
  // torch's unpickler would fail halfway, with an internal assertion.
  const auto [pickle, size] = reader.getRecord("data.pkl");
  const std::string_view head(static_cast<const char*>(pickle.get()), std::min<size_t>(size, 40));
  TORCH_CHECK(head.find("collections\nOrderedDict") == head.npos, "read_state_dict: ", path,
              " must hold a plain dict, got an OrderedDict, which LibTorch cannot read; in Python, "
              "save it with torch.save(dict(module.state_dict()), path)");
  const auto read = torch::jit::readArchiveAndTensors(
      "data", /*pickle_prefix=*/"", /*tensor_prefix=*/"data/", /*type_resolver=*/std::nullopt,
      /*obj_loader=*/std::nullopt, at::Device(at::kCPU), reader);
  TORCH_CHECK(
      read.isGenericDict(), "read_state_dict: ", path,
      " must hold a dict from names to tensors, as torch.save(dict(module.state_dict()), path) "
      "writes it, got ",
      read.tagKind());
  torch::OrderedDict<std::string, Tensor> state("entry");
  for (const auto& entry : read.toGenericDict()) {
    TORCH_CHECK(entry.key().isString() && entry.value().isTensor(), "read_state_dict: ", path,
                " must hold a dict from names to tensors, got an entry from ",
                entry.key().tagKind(), " to ", entry.value().tagKind());
    state.insert(entry.key().toStringRef(), entry.value().toTensor());
  }
  return state;
}

namespace {

// Returns the prefixes of the frequencies that a checkpoint may lack, all or none:
// "self_attn.spectral.".
std::vector<std::string> prefixes_of_frequencies(const torch::nn::Module& module) {
  std::vector<std::string> prefixes;
  for (const auto& entry : module.named_modules("", /*include_self=*/true)) {
    const auto* attention = entry.value()->as<MultiheadAttentionImpl>();
    if (attention == nullptr || !attention->spectral) continue;
    prefixes.push_back(entry.key().empty() ? "spectral." : entry.key() + ".spectral.");
  }
  return prefixes;
}

bool starts_with_any(const std::string& name, const std::vector<std::string>& prefixes) {
  for (const auto& prefix : prefixes) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

}  // namespace

void load_state_dict(torch::nn::Module& module,
                     const torch::OrderedDict<std::string, Tensor>& state) {
  auto absent = prefixes_of_frequencies(module);
  std::erase_if(absent, [&state](const std::string& prefix) {
    for (const auto& entry : state) {
      if (entry.key().starts_with(prefix)) return true;
    }
    return false;
  });
  std::vector<std::pair<Tensor, Tensor>> copies;  // to, from
  std::vector<std::string> missing, unexpected;
  torch::OrderedDict<std::string, Tensor> own = module.named_parameters();
  own.update(module.named_buffers());
  for (const auto& entry : own) {
    const auto* saved = state.find(entry.key());
    if (saved == nullptr) {
      if (!starts_with_any(entry.key(), absent)) missing.push_back(entry.key());
      continue;
    }
    TORCH_CHECK(saved->sizes() == entry.value().sizes(), "load_state_dict: ", entry.key(),
                " must have shape ", entry.value().sizes(), ", as in the module, got ",
                saved->sizes());
    copies.emplace_back(entry.value(), *saved);
  }
  for (const auto& entry : state) {
    if (!own.contains(entry.key())) unexpected.push_back(entry.key());
  }
  TORCH_CHECK(missing.empty() && unexpected.empty(),
              "load_state_dict: the checkpoint must have the entries of the module; missing: ",
              missing, "; unexpected: ", unexpected);
  const torch::NoGradGuard no_grad;
  for (auto& [to, from] : copies) to.copy_(from);
}

void load_state_dict(torch::nn::Module& module, const std::string& path) {
  load_state_dict(module, read_state_dict(path));
}

}  // namespace ikattn::nn
