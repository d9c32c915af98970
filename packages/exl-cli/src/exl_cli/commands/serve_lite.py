"""`exl serve-lite`: an OpenAI-compatible HTTP server over one engine, and a chat page."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from exl_cli import options
from exl_cli.engine_options import DEFAULT_CACHE_TOKENS
from exl_cli.hosts import check_options, end_with_job, join_job
from exl_cli.interrupt import exits_at_once
from exl_cli.option_groups import RunningOptions, spread
from exl_core.errors import RequestError, printable
from exl_core.files import CONFIG_LIMIT_BYTES, read_text_file
from exl_core.prompt.formats import find_format
from exl_core.settings import server_key

if TYPE_CHECKING:
    from fastapi import FastAPI

    from exl_cli.engine_options import EngineChoices
    from exl_cli.server.limits import Limits
    from exl_cli.server.models import Embedder, ModelHost, Prompting
    from exl_cli.serving import FileOpener
    from exl_core.settings import Launched

EXAMPLES = (
    ("exl serve-lite", "the default model on http://127.0.0.1:8080"),
    ("exl serve-lite model.gguf --port 9000 --ngram", "a model file, with n-gram drafts"),
    ("exl serve-lite --models-dir models", "any model of a folder, one loaded at a time"),
    ("EXL_API_KEY=secret exl serve-lite --host 0.0.0.0", "reachable by other machines, with a key"),
    ("torchrun --nproc-per-node 2 -m exl_cli serve-lite model.gguf", "divided among processes"),
)
KEY_FILE_LIMIT_BYTES = 2**20
_SERVER = "Server"
_LIMITS = "Limits"
_LOG = "Log"

Host = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="ADDRESS",
        help="Address to listen on. An address that other machines can reach requires a key.",
        rich_help_panel=_SERVER,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        "--port",
        metavar="N",
        min=0,
        max=65535,
        help="TCP port to listen on. 0: any free port.",
        rich_help_panel=_SERVER,
    ),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key",
        metavar="KEY",
        help="Key that clients must send. Default: the environment variable EXL_API_KEY, which "
        "other users of this machine cannot read, unlike a command line.",
        rich_help_panel=_SERVER,
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(
        "--api-key-file",
        metavar="FILE",
        help="File of accepted keys, one per line.",
        rich_help_panel=_SERVER,
    ),
]
AdminKey = Annotated[
    str | None,
    typer.Option(
        "--admin-key",
        metavar="KEY",
        help="Key with which clients may load and unload models. Without it they may not.",
        rich_help_panel=_SERVER,
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(
        "--served-model-name",
        metavar="NAME",
        help="Model name in the API. Default: the name of the model's file or directory.",
        rich_help_panel=_SERVER,
    ),
]
ModelsDir = Annotated[
    str | None,
    typer.Option(
        "--models-dir",
        metavar="DIR",
        help="Serve any model of this folder by name; one is loaded at a time. Without -m, the "
        "first of them is loaded at the start.",
        rich_help_panel=_SERVER,
    ),
]
AllowSpecial = Annotated[
    bool,
    typer.Option(
        "--allow-special",
        help="Encode text such as <|im_start|> in messages as special tokens, which lets a message "
        "imitate other roles. A request chooses for itself with its field allow_special.",
        rich_help_panel=_SERVER,
    ),
]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Refuse unknown request fields and model names, instead of ignoring the fields and "
        "serving the model under any name.",
        rich_help_panel=_SERVER,
    ),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"],
    typer.Option(
        "--log-level",
        help="Least severe lines of the log on stderr. info: one line per request.",
        rich_help_panel=_LOG,
    ),
]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option(
        "--log-format",
        help="Form of the log: text, or one JSON object per line.",
        rich_help_panel=_LOG,
    ),
]
LogPrompts = Annotated[
    bool,
    typer.Option("--log-prompts", help="Log the prompts too.", rich_help_panel=_LOG),
]
Cors = Annotated[
    list[str] | None,
    typer.Option(
        "--cors",
        metavar="ORIGIN",
        help="Let pages of this site use the server, such as http://localhost:3000; *: of every "
        "site, if the server has a key. May be given several times.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-host",
        metavar="NAME",
        help="Answer under this host name too. A server without a key answers only to localhost "
        "and its address. May be given several times.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
Alias = Annotated[
    list[str] | None,
    typer.Option(
        "--alias",
        metavar="NAME=MODEL",
        help="Serve a model of the folder under another name too. May be given several times.",
        show_default=False,
        rich_help_panel=_SERVER,
    ),
]
Preset = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="PRESET",
        help="Sampler settings of requests that do not choose. model: of the model's "
        "generation_config.json; neutral: the model's own distribution; or a JSON file of request "
        "fields.",
        rich_help_panel=_SERVER,
    ),
]
Template = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja chat template to use instead of the model's.",
        rich_help_panel=_SERVER,
    ),
]
EmbeddingModel = Annotated[
    str | None,
    typer.Option(
        "--embedding-model",
        metavar="MODEL",
        help="Model for /v1/embeddings and /v1/rerank. Without it, the served model.",
        rich_help_panel=_SERVER,
    ),
]
EmbeddingPooling = Annotated[
    Literal["auto", "mean", "last"],
    typer.Option(
        "--embedding-pooling",
        help="How the embedding model's states become a vector. auto: as its 1_Pooling/config.json "
        "says, else mean.",
        rich_help_panel=_SERVER,
    ),
]
TrustNetwork = Annotated[
    bool,
    typer.Option(
        "--trust-network",
        help="With torchrun on several hosts: let its processes connect over the network, without "
        "encryption. Any program that reaches their ports can take part, so use a private network.",
        rich_help_panel=_SERVER,
    ),
]
MaxBatch = Annotated[
    int,
    typer.Option(
        "--max-batch",
        metavar="N",
        min=1,
        max=1024,
        help="Maximum number of requests that run at the same time. Further requests wait.",
        rich_help_panel=_LIMITS,
    ),
]
CacheTokens = Annotated[
    int | None,
    typer.Option(
        "--cache-tokens",
        metavar="N",
        min=256,
        help="Size in tokens of the key-value cache that all requests share. Default: the context "
        f"size, at least {DEFAULT_CACHE_TOKENS}.",
        rich_help_panel=_LIMITS,
    ),
]
MaxQueue = Annotated[
    int,
    typer.Option(
        "--max-queue",
        metavar="N",
        min=0,
        help="Maximum number of waiting requests. Further ones are refused with HTTP 429.",
        rich_help_panel=_LIMITS,
    ),
]
MaxBody = Annotated[
    int,
    typer.Option(
        "--max-body",
        metavar="MIB",
        min=1,
        max=1024,
        help="Maximum size of a request body in MiB.",
        rich_help_panel=_LIMITS,
    ),
]
ReplySeconds = Annotated[
    float,
    typer.Option(
        "--reply-seconds",
        metavar="S",
        min=1,
        help="Maximum duration of one reply in seconds, counted from its first forward pass. The "
        "reply is cut off there.",
        rich_help_panel=_LIMITS,
    ),
]
StallSeconds = Annotated[
    float,
    typer.Option(
        "--stall-seconds",
        metavar="S",
        min=1,
        help="/health returns 503 after S seconds without progress while requests are pending.",
        rich_help_panel=_LIMITS,
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Options that select the model, the address and the accepted keys."""

    model: options.ModelArgument = None
    model_option: options.ModelOption = None
    host: Host = "127.0.0.1"
    port: Port = 8080
    api_key: ApiKey = None
    api_key_file: ApiKeyFile = None
    admin_key: AdminKey = None
    served_model_name: ServedName = None
    models_dir: ModelsDir = None
    allow_special: AllowSpecial = False
    strict: Strict = False
    cors: Cors = None
    allow_host: AllowHost = None
    alias: Alias = None
    preset: Preset = "model"
    chat_template: Template = None
    format: options.Format = None
    embedding_model: EmbeddingModel = None
    embedding_pooling: EmbeddingPooling = "auto"
    trust_network: TrustNetwork = False

    def of_several_models(self) -> dict[str, str | None]:
        """Options that load other models than one at the start."""
        return {
            "--models-dir": self.models_dir,
            "--admin-key": self.admin_key,
            "--embedding-model": self.embedding_model,
        }

    def prompting(self) -> Prompting:
        """Sampler defaults and prompt format. Raises RequestError for invalid ones."""
        from exl_cli.server.models import Prompting
        from exl_cli.server.presets import check_preset, defaults_of

        if self.format is not None and self.chat_template is not None:
            raise RequestError("two ways to write prompts", got="--format and --chat-template")
        check_preset(self.preset)
        preset = self.preset
        found = None if self.format is None else find_format(self.format)
        return Prompting(lambda path: defaults_of(preset, path), found)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    """Level, form and contents of the log."""

    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    log_prompts: LogPrompts = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Limits on concurrency, request size, duration and cache size."""

    max_batch: MaxBatch = 16
    max_queue: MaxQueue = 256
    max_body: MaxBody = 8
    reply_seconds: ReplySeconds = 1800.0
    stall_seconds: StallSeconds = 60.0
    cache_tokens: CacheTokens = None

    def of_requests(self) -> Limits:
        """The limits that hold for every request."""
        from exl_cli.server.limits import Limits

        return Limits(
            body_bytes=self.max_body * 2**20,
            max_queue=self.max_queue,
            reply_s=self.reply_seconds,
            stall_s=self.stall_seconds,
        )


@spread
def serve_lite(
    *,
    server: ServerOptions,
    quiet: options.Quiet = False,
    limits: LimitOptions,
    log: LogOptions,
    running: RunningOptions,
) -> None:
    """Serve a model over an OpenAI-compatible HTTP API, with a chat page at /.

    Ctrl-C or SIGTERM stops the server after the running replies are complete; a second signal
    stops it at once. The log has one line per request. Request fields that the server does not know
    are ignored, and named in the response header x-exl-ignored and in the log. There is no TLS: on
    an untrusted network, use a reverse proxy.

    'torchrun --nnodes 2 --nproc-per-node 2 ... -m exl_cli serve-lite MODEL' divides the layers of
    a model among hosts, and every matrix among the processes of a host. The first process serves.
    """
    model = options.pick_model(server.model, server.model_option)
    job = join_job(running, model, trusts_network=server.trust_network)
    choices = running.choices()
    check_options(job, server.of_several_models())
    _check_models_dir(server, choices)
    keys = _checked_keys(server)
    with exits_at_once():
        from exl_cli.server.models import ModelHost, models_in
        from exl_cli.server.run import listen, make_server, url_of

    opener = _opener(running, choices, limits, server.chat_template, job)
    prompting = server.prompting()
    others = {} if server.models_dir is None else models_in(Path(server.models_dir))
    spec, name = _initial_model(model, server.served_model_name, others)
    # Bind the port first: an address in use is then reported before the model is loaded.
    with closing(listen(server.host, server.port)) as listening:
        runtime = opener.load(spec, is_quiet=quiet)
        end_with_job(job, runtime)
        if others:
            name = name or runtime.name
        known = limits.of_requests()
        host = ModelHost(
            runtime,
            name=name,
            others=others,
            opener=opener,
            aliases=_aliases(server.alias, list(dict.fromkeys((name or runtime.name, *others)))),
            is_strict=server.strict,
            prompting=prompting,
        )
        host.embedder = _embedder(running, choices, server, is_quiet=quiet)
        app = _app(host, known, keys, server, log)
        _start_log(log, is_quiet=quiet)

        def announce() -> None:
            if not quiet:
                typer.echo(f"{printable(host.default)} at {url_of(listening)}", err=True)
                _show_defaults(host)

        make_server(app, known, announce).run(sockets=[listening])


def _check_models_dir(server: ServerOptions, choices: EngineChoices) -> None:
    if server.models_dir is not None and (choices.loras or choices.draft_model):
        raise RequestError(
            "an adapter or a draft model belongs to one model",
            expected="--models-dir without --lora and --draft-model",
        )


def _opener(
    running: RunningOptions,
    choices: EngineChoices,
    limits: LimitOptions,
    template: str | None,
    job: Launched | None,
) -> FileOpener:
    """Opener of the server's models. `template`: file with their chat template."""
    source = None if template is None else read_text_file(Path(template), CONFIG_LIMIT_BYTES)
    with exits_at_once():
        from exl_cli.serving import FileOpener
    return FileOpener(
        running,
        choices,
        max_batch=limits.max_batch,
        cache_tokens=limits.cache_tokens or DEFAULT_CACHE_TOKENS,
        template=None if source is None else (source, str(template)),
        job=job,
    )


def _embedder(
    running: RunningOptions, choices: EngineChoices, server: ServerOptions, *, is_quiet: bool
) -> Embedder | None:
    """The embedding model, with a cache of one context."""
    if server.embedding_model is None:
        return None
    from exl_cli.server.models import Embedder, Resident
    from exl_cli.server.pooling import pooling_of

    own = replace(choices, draft_model=None, draft_tokens=None, ngram=False, mtp=False, loras=())
    runtime = running.open(server.embedding_model, own, is_quiet=is_quiet)
    pooling = pooling_of(runtime.loaded, server.embedding_pooling)
    return Embedder(Resident(runtime.name, runtime), pooling)


def _app(
    host: ModelHost,
    limits: Limits,
    keys: frozenset[str],
    server: ServerOptions,
    log: LogOptions,
) -> FastAPI:
    with exits_at_once():
        from exl_cli.server.app import Access, create_app
        from exl_cli.server.limits import hosts_of
    return create_app(
        host,
        limits=limits,
        access=Access(
            keys,
            hosts_of(server.host, keys, server.allow_host or ()),
            server.cors or (),
            admin_keys=_keys(server.admin_key, None),
        ),
        allow_special=server.allow_special,
        is_strict=server.strict,
        logs_prompts=log.log_prompts,
    )


def _show_defaults(host: ModelHost) -> None:
    """One line with the sampler settings of requests that do not choose, if there are any."""
    defaults = {} if host.resident is None else host.resident.defaults
    if defaults:
        said = ", ".join(f"{name} {value}" for name, value in defaults.items())
        typer.echo(f"defaults: {said} (--preset neutral: none)", err=True)


def _aliases(given: list[str] | None, names: Sequence[str]) -> dict[str, str]:
    """Models by their aliases."""
    found: dict[str, str] = {}
    for one in given or ():
        alias, mark, model = one.partition("=")
        if not mark or not alias or model not in names:
            raise RequestError(
                "--alias names no model that is served",
                expected=f"NAME=MODEL with one of {', '.join(names)}",
                got=one,
            )
        found[alias] = model
    return found


def _start_log(log: LogOptions, *, is_quiet: bool) -> None:
    from exl_cli.server.record import set_up_log

    level = "error" if is_quiet and log.log_level == "info" else log.log_level
    set_up_log(level, as_json=log.log_format == "json")


def _checked_keys(server: ServerOptions) -> frozenset[str]:
    """The API keys. Raises RequestError if the server may not be open as wide without one."""
    with exits_at_once():
        from exl_cli.server.limits import check_bind, check_origins
    key = server_key() if server.api_key is None else server.api_key
    keys = _keys(key, server.api_key_file)
    check_bind(server.host, has_key=bool(keys))
    check_origins(server.cors or (), has_key=bool(keys))
    return keys


def _keys(api_key: str | None, api_key_file: str | None) -> frozenset[str]:
    """API keys from the option or the environment, and from the key file."""
    lines = [] if api_key is None else [api_key]
    if api_key_file is not None:
        found = read_text_file(Path(api_key_file), KEY_FILE_LIMIT_BYTES).split()
        if not found:
            raise RequestError("no key in the file", where=api_key_file)
        lines += found
    for line in lines:
        if not line or not line.isascii() or not line.isprintable() or " " in line:
            raise RequestError(
                "a key is not one that a client could send",
                where="--api-key",
                expected="printable ASCII without spaces",
            )
    return frozenset(lines)


def _initial_model(
    model: str | None, served_name: str | None, others: dict[str, Path]
) -> tuple[str | None, str | None]:
    """Model spec to load at the start, and its name in the API; None is the file's name."""
    if others and served_name is not None:
        raise RequestError(
            "models of a folder are called by their names there",
            expected="--models-dir or --served-model-name",
        )
    if others and model is None:
        model = next(iter(others))
    return (str(others[model]), model) if model in others else (model, served_name)
