"""Tables of the globals in pickles: those that frameworks write, and those that can act.

Facts without behaviour; `policy` decides with them. A line is `module: name name`; `*` stands
for every name of the module that begins with a capital letter, as classes do, and `module.**`
for the same in the module and in all below it. Names are those of Python 3.

Source: the `__reduce__` of each class in CPython 3.11 to 3.14; `copyreg.py`; torch 2.13
`_weights_only_unpickler.py` (`_get_allowed_globals`), `_utils.py`, `_tensor.py`, `storage.py`,
`serialization.py`; NumPy 2.4 `_core/multiarray.py` and `random/_pickle.py`; steps written by the
frameworks of `tests/integrations`, with the versions in `docs/compatibility.md`.
"""

from __future__ import annotations

STANDARD_LIBRARY = """
builtins: object bool int float complex str bytes bytearray list tuple dict set frozenset slice
builtins: range memoryview Ellipsis NotImplemented zip enumerate reversed
_codecs: encode
argparse: Namespace
array: array _array_reconstructor
calendar: Day Month IllegalMonthError IllegalWeekdayError
collections: OrderedDict defaultdict Counter deque ChainMap UserDict UserList UserString
collections.abc: *
_collections_abc: dict_keys dict_values dict_items
configparser: ConfigParser RawConfigParser SectionProxy
contextvars: Context
copyreg: __newobj__ __newobj_ex__ _reconstructor
dataclasses: Field _MISSING_TYPE _HAS_DEFAULT_FACTORY_CLASS _KW_ONLY_TYPE
datetime: date datetime time timedelta timezone
decimal: Decimal Context
_decimal: Decimal Context
_pydecimal: Decimal Context
enum: *
fractions: Fraction
functools: partial
http: HTTPStatus HTTPMethod
inspect: Signature Parameter _ParameterKind _empty
io: BytesIO StringIO
_io: BytesIO StringIO
ipaddress: *
itertools: count cycle repeat chain islice product permutations combinations
itertools: combinations_with_replacement compress zip_longest pairwise batched
json.decoder: JSONDecodeError
logging: Logger RootLogger LogRecord PlaceHolder getLogger
numbers: *
operator: itemgetter
pathlib: Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath
pathlib._local: Path PurePath PosixPath PurePosixPath WindowsPath PureWindowsPath
queue: Empty Full
random: Random
_random: Random
re: _compile RegexFlag
re._constants: error
signal: Signals Handlers Sigmasks
socket: AddressFamily SocketKind timeout
statistics: NormalDist StatisticsError
string: Template
subprocess: CalledProcessError TimeoutExpired SubprocessError
threading: BrokenBarrierError
time: struct_time
types: SimpleNamespace GenericAlias NoneType EllipsisType NotImplementedType
typing: *
uuid: UUID SafeUUID
weakref: WeakSet
zoneinfo: ZoneInfo
"""

FRAMEWORKS = """
numpy: ndarray dtype matrix recarray record broadcast void flatiter bool_ generic number integer
numpy: signedinteger unsignedinteger inexact floating complexfloating flexible character object_
numpy: str_ bytes_ datetime64 timedelta64 float16 float32 float64 float128 longdouble complex64
numpy: complex128 complex256 int8 int16 int32 int64 uint8 uint16 uint32 uint64 bool intc uintc
numpy: longlong ulonglong long ulong intp uintp half single double float_ int_ uint
numpy.core.multiarray: _reconstruct scalar
numpy._core.multiarray: _reconstruct scalar
numpy.core.numeric: _frombuffer
numpy._core.numeric: _frombuffer
numpy._core.umath: _ufunc_reconstruct
numpy.core: _ufunc_reconstruct
numpy._core: _ufunc_reconstruct
numpy.core._internal: _convert_to_stringdtype_kwargs
numpy._core._internal: _convert_to_stringdtype_kwargs
numpy.core.records: recarray record
numpy._core.records: recarray record
numpy.rec: recarray record
numpy.dtypes: *
numpy.ma.core: _mareconstruct MaskedArray MaskedConstant mvoid
numpy.ma: MaskedArray
numpy.matrixlib.defmatrix: matrix
numpy.polynomial.**: *
numpy.random: RandomState Generator MT19937 PCG64 PCG64DXSM Philox SFC64 SeedSequence
numpy.random._pickle: __randomstate_ctor __generator_ctor __bit_generator_ctor
numpy.random.mtrand: RandomState
numpy.random._generator: Generator
numpy.random._mt19937: MT19937
numpy.random._pcg64: PCG64 PCG64DXSM
numpy.random._philox: Philox
numpy.random._sfc64: SFC64
numpy.random.bit_generator: SeedSequence SeedlessSeedSequence __pyx_unpickle_SeedSequence
numpy.random.bit_generator: __pyx_unpickle_SeedlessSeedSequence
pandas._libs.internals: _unpickle_block BlockManager
pandas._libs.arrays: __pyx_unpickle_NDArrayBacked NDArrayBacked
pandas._libs.interval: Interval __pyx_unpickle_IntervalMixin
pandas._libs.missing: NAType
pandas._libs.tslibs.**: * _unpickle_timestamp _timedelta_unpickle __nat_unpickle
pandas.core.arrays.**: *
pandas.core.dtypes.**: *
pandas.core.flags: Flags
pandas.core.frame: DataFrame
pandas.core.series: Series
pandas.core.internals.**: * new_block
pandas.core.indexes.**: * _new_Index _new_DatetimeIndex _new_PeriodIndex new_block
pandas: DataFrame Series Index RangeIndex MultiIndex Timestamp Timedelta Period Interval NA
torch: Size device Generator Tensor Storage dtype layout memory_format finfo iinfo ScriptObject
torch: strided sparse_coo sparse_csr sparse_csc sparse_bsr sparse_bsc jagged _mkldnn
torch: contiguous_format channels_last channels_last_3d preserve_format
torch: per_tensor_affine per_tensor_symmetric per_channel_affine per_channel_symmetric
torch: per_channel_affine_float_qparams
torch: FloatTensor DoubleTensor HalfTensor BFloat16Tensor ByteTensor CharTensor ShortTensor
torch: IntTensor LongTensor BoolTensor ComplexFloatStorage QInt8Storage QInt32Storage
torch.cuda: FloatTensor DoubleTensor HalfTensor BFloat16Tensor ByteTensor CharTensor ShortTensor
torch.cuda: IntTensor LongTensor BoolTensor FloatStorage DoubleStorage HalfStorage
torch.cuda: BFloat16Storage ByteStorage LongStorage IntStorage BoolStorage
torch._C: Generator Size device dtype layout memory_format _TensorBase
torch._C._distributed_c10d: ReduceOp WorkRequest Store
torch._tensor: Tensor _rebuild_from_type _rebuild_from_type_v2
torch._utils: _rebuild_tensor _rebuild_tensor_v2 _rebuild_tensor_v3 _rebuild_parameter
torch._utils: _rebuild_parameter_with_state _rebuild_sparse_tensor _rebuild_nested_tensor
torch._utils: _rebuild_qtensor _rebuild_device_tensor_from_numpy _rebuild_xla_tensor
torch._utils: _rebuild_device_tensor_from_cpu_tensor _rebuild_meta_tensor_no_storage
torch._utils: _rebuild_wrapper_subclass _rebuild_sparse_csr_tensor
torch._subclasses.fake_tensor: FakeTensor
torch.amp.grad_scaler: OptState GradScaler _refresh_per_optimizer_state
torch.cuda.amp.grad_scaler: OptState GradScaler _refresh_per_optimizer_state
torch.ao.quantization.**: *
torch.ao.nn.**: *
torch.distributed._mesh_layout: *
torch.distributed._pycute.**: *
torch.distributed._shard.**: *
torch.distributed._sharded_tensor.**: *
torch.distributed._tensor.**: *
torch.distributed._state_dict_utils: *
torch.distributed._composable.**: *
torch.distributed.checkpoint.**: *
torch.distributed.device_mesh: * _MeshEnv
torch.distributed.distributed_c10d: ReduceOp
torch.distributed.fsdp.**: *
torch.distributed.optim.**: *
torch.distributed.remote_device: _remote_device
torch.distributed.tensor.**: *
torch.distributions.**: *
torch.fx.immutable_collections: immutable_dict immutable_list
torch.nested._internal.nested_tensor: NestedTensor _rebuild_njt
torch.nn: Parameter
torch.nn.parameter: *
torch.nn.modules.**: *
torch.nn.utils.**: *
torch.nn.attention.**: *
torch.optim.**: *
torch.optim: *
torch.random: *
torch.serialization: _get_layout
torch.storage: UntypedStorage TypedStorage _LegacyStorage _load_from_bytes
torch.torch_version: TorchVersion
torch.utils._pytree: *
torch.utils.data.**: *
torchao.**: *
torchdata.**: *
torchsnapshot.**: *
torchtitan.**: *
torchtune.**: *
torchvision.**: *
transformers.**: *
tokenizers: *
tokenizers.**: *
accelerate.**: *
deepspeed.**: * fragment_address
megatron.**: *
verl.**: *
lightning.**: *
lightning_fabric.**: *
pytorch_lightning.**: *
lightning_utilities.**: *
composer.**: *
streaming.**: *
olmo_core.**: *
nemo.**: *
nvidia_resiliency_ext.**: *
transformer_engine.**: *
apex.**: *
bitsandbytes.**: *
peft.**: *
trl.**: *
datasets.**: *
fairscale.**: *
fairseq.**: *
timm.**: *
ray.**: *
tensordict.**: * _rebuild_tensordict_files
omegaconf: DictConfig ListConfig
omegaconf.**: *
hydra.**: *
ml_collections.**: *
easydict: EasyDict
addict.addict: Dict
box.**: *
yacs.config: CfgNode
mmengine.**: *
PIL.**: *
"""
"""What frameworks keep in their files. Of their classes only those that `ACTING` lacks."""

ACTING = """
os posix nt subprocess _posixsubprocess pty tty socket _socket ssl _ssl shutil
webbrowser ctypes _ctypes importlib imp _imp _frozen_importlib _frozen_importlib_external
zipimport pkgutil runpy code codeop pickle _pickle pickletools cPickle shelve dbm marshal pip
ensurepip venv setuptools pkg_resources distutils _distutils_hack pdb bdb cmd profile cProfile
timeit trace tracemalloc sys gc inspect atexit signal _signal faulthandler multiprocessing
_multiprocessing concurrent asyncio threading _thread http urllib ftplib smtplib poplib imaplib
nntplib telnetlib xmlrpc socketserver sqlite3 _sqlite3 tempfile fileinput pydoc doctest unittest
test idlelib lib2to3 turtle turtledemo tkinter _tkinter antigravity site sitecustomize
usercustomize platform logging.config mmap msvcrt winreg _winapi fcntl resource select selectors
zipfile tarfile gzip bz2 lzma compileall py_compile linecache popen2 commands nis crypt curses
readline rlcompleter sched syslog cgi cgitb wsgiref mailcap netrc configparser.open
torch.hub torch.package torch.utils.cpp_extension torch.utils.model_zoo torch.utils.bottleneck
torch.fx torch.utils.data.datapipes torch.utils.data.dataframes torch._inductor torch._dynamo
torch.multiprocessing torch.distributed.run torch.distributed.launch
torch.distributed.launcher torch.distributed.elastic torch.distributed.rpc torch.jit torch.export
torch.utils._cpp_extension_versioner torch.utils.collect_env torch.testing
numpy.f2py numpy.distutils numpy.testing numpy.lib.npyio numpy.lib._npyio_impl numpy.ctypeslib
sympy mpmath jinja2 pandas.core.computation
numpy._pytesttester cloudpickle dill jsonpickle joblib IPython ptpython pexpect ptyprocess sh
plumbum fabric invoke paramiko psutil cffi numba cython Cython pyximport execnet gevent eventlet
twisted click typer fsspec smart_open werkzeug mako nose pytest _pytest
transformers.dynamic_module_utils transformers.utils.import_utils accelerate.commands
deepspeed.launcher deepspeed.ops.op_builder omegaconf.resolvers hydra.utils
hydra._internal lightning.fabric.cli ray.cloudpickle
"""
"""Packages and modules in which every name is one that can act, but for those in the tables."""

ACTING_NAMES = """
builtins: eval exec compile open input breakpoint getattr setattr delattr globals locals vars
builtins: __import__ __build_class__ type map filter iter help exit quit
codecs: open lookup getreader getwriter encode decode StreamReaderWriter
_codecs: decode lookup lookup_error register
io: open open_code FileIO TextIOWrapper BufferedReader BufferedWriter
_io: open open_code FileIO TextIOWrapper BufferedReader BufferedWriter
functools: reduce
operator: attrgetter methodcaller call setitem delitem getitem
_operator: attrgetter methodcaller call setitem delitem getitem
itertools: starmap filterfalse takewhile dropwhile accumulate groupby tee
types: FunctionType LambdaType CodeType MethodType ModuleType new_class prepare_class CellType
types: coroutine DynamicClassAttribute TracebackType FrameType BuiltinFunctionType
copyreg: add_extension pickle remove_extension
enum: EnumMeta EnumType
typing: NamedTuple TypedDict NamedTupleMeta
abc: ABCMeta
torch: load save compile
torch.serialization: load save _load _legacy_load
torch._C: _jit_import PyTorchFileReader PyTorchFileWriter ScriptModule CompilationUnit
torch.library: define impl custom_op
torch.nn.modules.module: register_module_forward_hook register_module_forward_pre_hook
numpy: load save savez fromfile loadtxt genfromtxt memmap DataSource fromregex fromfunction
numpy: apply_along_axis apply_over_axes frompyfunc vectorize
numpy.core.memmap: memmap
numpy._core.memmap: memmap
pandas: read_pickle read_csv read_json read_html read_sql read_hdf eval
pandas.io.pickle: read_pickle
pandas.core.computation.eval: eval
yaml: load unsafe_load full_load load_all
datasets: load_dataset load_from_disk
omegaconf: OmegaConf
ray: get put init remote
PIL.Image: open
"""

JUDGED = """
torch numpy scipy pandas matplotlib sympy PIL sklearn transformers accelerate deepspeed megatron
verl lightning lightning_fabric pytorch_lightning composer streaming olmo_core nemo
nvidia_resiliency_ext transformer_engine apex bitsandbytes peft trl datasets fairscale fairseq timm
ray torchdata torchsnapshot torchtitan torchtune torchvision torchao tokenizers omegaconf hydra
yaml ruamel tensorflow jax jaxlib flax keras nltk spacy gensim networkx sqlalchemy django flask
safetensors tensordict rich pydantic attr requests urllib3 httpx aiohttp jinja2 git gitdb
huggingface_hub wandb mlflow boto3 botocore s3fs gcsfs adlfs obstore ckptctl
"""
"""Packages with functions that open, run or load things: one of them that is called is unsafe
unless the tables have it. Classes of theirs that the tables lack are unknown."""
