"""`LLM`: the offline API. An engine in this process, and lists of prompts run through it.

Owns: the offline methods and their result records.
Reads: `config`, `model_summary`, `frontend`, `offline_engine`, `engine.launch`.
Never: installs a signal handler, starts a server, or runs a prompt before all of them are known to be valid.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from oarlock.config.sections import EngineConfig
from oarlock.errors import InvalidParameter, NotBuilt, OarlockError
from oarlock.frontend.conversation import read_messages, text_of
from oarlock.frontend.inputs import InputLimits, InputProcessor, default_sampling_fields
from oarlock.frontend.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput, exception_for
from oarlock.frontend.prompt_forms import conversation_list, naming, prompt_list
from oarlock.llm_pooling import PoolingMethods
from oarlock.model_summary import ModelSummary
from oarlock.offline_engine import OfflineEngine, Prepared
from oarlock.pooling_params import PoolingParams
from oarlock.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from oarlock.async_llm import AsyncLLM
    from oarlock.engine.client import InProcessClient

__all__ = ["LLM", "AsyncLLM", "BeamSearchOutput", "BeamSearchSequence", "CompletionOutput", "Logprob", "Metric", "RequestMetrics", "RequestOutput"]

log = logging.getLogger("oarlock.llm")
TOKENIZER_NEEDS = ("encode", "decode", "token_bytes", "make_stream", "vocab_size", "eos_token_id", "bos_token_id")


@dataclass(slots=True)
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]  # prompt and generated
    text: str | None  # prompt and generated; None when the tokenizer is off
    cum_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class Metric:
    """One number about the engine. Counters are since start."""

    name: str
    kind: str  # "counter" or "gauge"
    value: float
    labels: dict[str, str] = field(default_factory=dict)


class LLM(PoolingMethods):
    """A model in this process. `LLM(model, **options)`: every option of `oarlock serve` that is not the server's, with underscores.

    Calls from several threads run one after another. A context manager; `close()` and `del` free everything.

    Raises:
        TypeError: an unknown option. ConfigError, ModelError, PluginError: what cannot be honoured, and why.
    """

    def __init__(self, model: str | None = None, tokenizer: str | None = None, **options: Any) -> None:
        from oarlock.config.resolve import from_kwargs
        from oarlock.engine.launch import prepare

        if tokenizer is not None:
            options["tokenizer"] = tokenizer
        resolved = from_kwargs(model, **options)
        for warning in resolved.warnings:
            log.warning("%s", warning)
        config = resolved.engine
        try:
            launch = prepare(config)
        except OarlockError as error:  # whoever wrote this call is to see that line and the message, and not our own frames
            raise error if os.environ.get("OARLOCK_TRACEBACK") else error.with_traceback(None) from None
        summary = launch.summary
        loaded = None
        if not config.model.skip_tokenizer_init:
            from oarlock.frontend.tokenizer import load_tokenizer

            loaded = load_tokenizer(summary, config.model)
        self._attach(launch.inprocess, summary, loaded, launch.config)

    @classmethod
    def from_client(cls, client: InProcessClient, summary: ModelSummary, tokenizer: Any | None, config: EngineConfig | None = None) -> LLM:
        """An LLM over an engine that is already there; it is shut down with the LLM."""
        llm = cls.__new__(cls)
        llm._attach(lambda: client, summary, tokenizer, config)
        return llm

    def _attach(self, launch: Callable[[], InProcessClient], summary: ModelSummary, tokenizer: Any | None, config: EngineConfig | None) -> None:
        self.config = config
        self.summary = summary
        self._limits = InputLimits() if config is None else InputLimits.make(config.model)
        self._request_ids = itertools.count()
        self._engine = OfflineEngine(launch, max_waiting_requests=None if config is None else config.scheduler.max_waiting_requests)
        self._use_tokenizer(tokenizer)

    def _use_tokenizer(self, tokenizer: Any | None) -> None:
        self.tokenizer = tokenizer
        self._template: Any = None
        self._processor = InputProcessor(self._engine.info, tokenizer, self.summary, self._limits)
        self._engine.use_tokenizer(tokenizer)

    # ---------------------------------------------------------------- generation
    def generate(
        self,
        prompts: Any = None,  # one prompt or a list: str, token ids, {"prompt": ...}, {"prompt_token_ids": ...}
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,  # None: the checkpoint's defaults
        prompt_token_ids: Any = None,  # instead of prompts, or beside them: one list of ids, or one for each prompt
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        *,
        inputs: Any = None,  # older name of prompts
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Results in the order of the prompts. All prompts are checked before any runs.

        A request that fails while it runs has finish_reason "error" and `.error`; the others finish. If all fail, the first error is raised.

        Raises:
            RequestError (mostly ValueErrors too): a prompt or parameter is not valid; with several prompts the message names its index.
            EngineDead: the engine has ended.
        """
        self._refuse_lora(lora_request)
        if inputs is not None:
            if prompts is not None:
                raise InvalidParameter("inputs is the older name of prompts; give one of them.", param="inputs")
            prompts = inputs
        every = prompt_list(prompts, prompt_token_ids)
        params = self._params_for(sampling_params, len(every))
        return self._run(self._prepare(every, params, priority), use_tqdm)

    def chat(
        self,
        messages: Any,  # one conversation (a list of {"role", "content"}), or a list of them
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        chat_template: str | None = None,  # the template itself or its file; None: the model's
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,  # passed to the template
        chat_template_kwargs: dict[str, Any] | None = None,
        chat_template_content_format: Literal["auto", "string", "openai"] = "auto",  # "openai": lists of parts reach the template as they are
    ) -> list[RequestOutput]:
        """`generate` for conversations, by the model's chat template. Raises as `generate` does."""
        self._refuse_lora(lora_request)
        if chat_template_content_format not in ("auto", "string", "openai"):
            name = "chat_template_content_format"
            raise InvalidParameter(f'{name} is {chat_template_content_format!r:.80}; give "auto", "string" or "openai".', param=name)
        template = self._chat_template(chat_template)
        template.check_kwargs(chat_template_kwargs or ())
        if tools and "tools" not in template.variables and "tool_use" not in template.sources:
            raise InvalidParameter("tools: the chat template has no variable 'tools', so they would have no effect; leave them out.", param="tools")
        conversations = conversation_list(messages)
        params = self._params_for(sampling_params, len(conversations))
        texts = []
        for index, conversation in enumerate(conversations):
            with naming(index, len(conversations), "conversation"):
                settings = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message, "tools": tools}
                checked = read_messages(conversation, template)
                if chat_template_content_format == "string":
                    checked = [{**message, "content": text_of(message["content"])} for message in checked]
                texts.append(template.render(checked, **settings, **(chat_template_kwargs or {})))
        return self._run(self._prepare(texts, params, None, add_special_tokens=False, param="messages"), use_tqdm)

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, lora_request: None = None, use_tqdm: bool | Callable[..., Any] = False
    ) -> list[BeamSearchOutput]:
        """For each prompt its `beam_width` best continuations. Raises as `generate` does."""
        self._refuse_lora(lora_request)
        if not isinstance(params, BeamSearchParams):
            raise InvalidParameter(f"params is of type {type(params).__name__}; give a BeamSearchParams.", param="params")
        every = prompt_list(prompts, None)
        results = self._run(self._prepare(every, [params.to_sampling_params()] * len(every), None), use_tqdm)
        return [BeamSearchOutput([self._beam(result, choice) for choice in result.outputs]) for result in results]

    def _beam(self, result: RequestOutput, choice: CompletionOutput) -> BeamSearchSequence:
        tokens = result.prompt_token_ids + choice.token_ids
        text = None if self.tokenizer is None else self.tokenizer.decode(result.prompt_token_ids) + choice.text
        return BeamSearchSequence(tokens, text, choice.cumulative_logprob, choice.logprobs, choice.finish_reason, choice.stop_reason)

    def get_default_sampling_params(self) -> SamplingParams:
        """What `generate` uses without sampling_params: the checkpoint's generation_config over our own defaults."""
        source = "auto" if self.config is None else self.config.model.generation_config
        return SamplingParams(**default_sampling_fields(self.summary, source))

    # ---------------------------------------------------------------- the rest of the public surface
    def get_tokenizer(self) -> Any:
        """The tokenizer; None under skip_tokenizer_init."""
        return self.tokenizer

    def set_tokenizer(self, tokenizer: Any) -> None:
        """Use another tokenizer from now on, such as one that `frontend.tokenizer.load_tokenizer` made."""
        missing = [name for name in TOKENIZER_NEEDS if not hasattr(tokenizer, name)]
        if missing:
            raise InvalidParameter(f"the tokenizer of type {type(tokenizer).__name__} has no {', '.join(missing)}.", param="tokenizer")
        self._use_tokenizer(tokenizer)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached block; True, as nothing runs between calls."""
        self._engine.reset_prefix_cache()
        return True

    def get_metrics(self) -> list[Metric]:
        """A snapshot of the engine's counters, by the names of the /metrics page."""
        stats, totals = self._engine.inbox.stats, self._engine.totals
        gauges: dict[str, float] = {
            "vllm:num_requests_running": stats.num_running,
            "vllm:num_requests_waiting": stats.num_waiting,
            "vllm:kv_cache_usage_perc": stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0,
        }
        counters: dict[str, float] = {
            "vllm:num_preemptions": stats.num_preemptions,
            "vllm:prefix_cache_queries": stats.prefix_queries,
            "vllm:prefix_cache_hits": stats.prefix_hits,
            "vllm:prompt_tokens": totals["prompt"],
            "vllm:generation_tokens": totals["generated"],
            "vllm:request_success": totals["finished"],
        }
        return [
            *(Metric(name, "gauge", float(value)) for name, value in gauges.items()),
            *(Metric(name, "counter", float(value)) for name, value in counters.items()),
        ]

    def close(self) -> None:
        """End the engine and free what it holds; idempotent. The LLM cannot be used afterwards."""
        self._engine.close()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---------------------------------------------------------------- before a run
    @staticmethod
    def _refuse_lora(lora_request: object) -> None:
        if lora_request is not None:
            raise NotBuilt("lora_request: this version has no LoRA adapters; merge the adapter into the checkpoint, or leave it out.")

    def _params_for(self, given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if given is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, Sequence) or isinstance(given, str):
            raise InvalidParameter(f"sampling_params is of type {type(given).__name__}; give one SamplingParams or a list.", param="sampling_params")
        if len(given) != count:
            raise InvalidParameter(f"{len(given)} sampling_params for {count} prompts; give one, or as many as prompts.", param="sampling_params")
        return list(given)

    def _prepare(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams | PoolingParams],
        priority: Sequence[int] | None,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
    ) -> list[Prepared]:
        """Every prompt as a request, or the first error, with the prompt's index when there are several."""
        if priority is not None:
            if len(priority) != len(prompts):
                raise InvalidParameter(f"{len(priority)} priorities for {len(prompts)} prompts; give one for each.", param="priority")
            if self.config is not None and self.config.scheduler.policy != "priority" and any(priority):
                raise InvalidParameter('priority has no effect under scheduling_policy "fcfs"; make the LLM with "priority".', param="priority")
        prepared = []
        for index, prompt in enumerate(prompts):
            with naming(index, len(prompts), "prompt"):
                prepared.append(
                    self._processor.make_request(
                        prompt,
                        params[index],
                        str(next(self._request_ids)),
                        priority=priority[index] if priority is not None else 0,
                        add_special_tokens=add_special_tokens,
                        param=param,
                    )
                )
        return prepared

    def _chat_template(self, given: str | None) -> Any:
        from oarlock.frontend.chat import load_chat_template, missing_template

        if self.tokenizer is None:
            raise InvalidParameter("chat needs a tokenizer, which skip_tokenizer_init turned off; use generate with token ids.", param="messages")
        if given is not None:
            return load_chat_template(given, self.tokenizer, self.summary)
        if self._template is None:
            self._template = load_chat_template(None, self.tokenizer, self.summary)
        if self._template is None:
            raise missing_template(self.summary.path, "give one as chat_template, or use generate() with a text")
        return self._template

    def _run(self, requests: list[Prepared], use_tqdm: bool | Callable[..., Any]) -> list[RequestOutput]:
        progress = _Progress(len(requests), use_tqdm)
        try:
            results = self._engine.run(requests, progress.finish)
        finally:
            progress.close()
        failed = [result for result in results if result.error is not None]
        if failed and len(failed) == len(results):
            assert failed[0].error is not None
            raise exception_for(failed[0].error)
        for result in failed:
            assert result.error is not None
            log.error("request %s failed: %s", result.request_id, result.error.message)
        return results


def _refusal(name: str, what: str) -> Callable[..., Any]:
    def method(self: LLM, *args: Any, **kwargs: Any) -> Any:
        raise NotBuilt(f"LLM.{name}: {what}.")

    method.__name__ = name
    method.__doc__ = f"Not in this version: {what}."
    return method


LLM.reward = _refusal("reward", "this version serves no reward models; a classifier's logits come from classify")  # type: ignore[attr-defined]
for _name in ("sleep", "wake_up"):
    setattr(LLM, _name, _refusal(_name, "this version cannot park a model; close() frees its memory, and a new LLM loads it again"))
for _name in ("collective_rpc", "apply_model", "start_profile", "stop_profile", "enqueue", "wait_for_completion"):
    setattr(LLM, _name, _refusal(_name, "this version has no such call"))


class _Progress:
    """A bar on stderr, or nothing."""

    def __init__(self, total: int, use_tqdm: bool | Callable[..., Any]) -> None:
        self._bar: Any = None
        self._tokens, self._start = 0, time.monotonic()
        if use_tqdm and total:
            make_bar: Any = use_tqdm
            if use_tqdm is True:
                import tqdm

                make_bar = tqdm.tqdm
            self._bar = make_bar(total=total, desc="Processed prompts", dynamic_ncols=True)

    def finish(self, delta: RequestOutput) -> None:
        if self._bar is not None:
            self._tokens += delta.num_generated_tokens or len(delta.prompt_token_ids)  # a vector: the prompt is the work
            self._bar.set_postfix_str(f"{self._tokens / max(1e-9, time.monotonic() - self._start):.1f} tokens/s", refresh=False)
            self._bar.update(1)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def __getattr__(name: str) -> Any:
    if name == "AsyncLLM":  # offline use needs no asyncio
        from oarlock.async_llm import AsyncLLM

        return AsyncLLM
    raise AttributeError(f"module 'oarlock.llm' has no attribute {name!r}")
