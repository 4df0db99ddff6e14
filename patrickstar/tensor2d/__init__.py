"""Two-dimensional tensor parallelism: parameters and activations are sharded over a mesh of rows and columns.

    from patrickstar.ranks.mesh import Mesh
    from patrickstar.tensor2d import Linear2D, MeshGroup

    group = MeshGroup.of_torch(Mesh(rows=2, columns=2))
    layer = Linear2D(1024, 4096, group)                # each rank has a block [512, 2048] of the weight
    out = layer(hidden)                                # [b/2, s, 512] -> [b/2, s, 2048]

The algorithm is Optimus (Xu et al., *An Efficient 2D Method for Training Super-Large Deep Learning Models*, arXiv
2104.05343), extended to any r x c mesh. Samples are sharded over rows, features and heads over columns. Products are
made of panels that are broadcast while others are multiplied (:mod:`~patrickstar.tensor2d.products`).
:mod:`~patrickstar.tensor2d.cost` computes communication volumes and compares with one dimension.
"""

from patrickstar.tensor2d.attention import Attention2D, Heads2D
from patrickstar.tensor2d.clipping import clip_grad_norm
from patrickstar.tensor2d.division import Placement, Split, assemble_activation, divide_activation, divide_batch
from patrickstar.tensor2d.embedding import Embedding2D, SmallEmbedding2D
from patrickstar.tensor2d.feed_forward import MLP2D, GatedMLP2D
from patrickstar.tensor2d.group import MeshGroup, MeshPlace
from patrickstar.tensor2d.layer import Layer2D, load_whole, match_replicas, source_values, whole_values
from patrickstar.tensor2d.linear import Linear2D, Sent, initialise_normal
from patrickstar.tensor2d.losses import CrossEntropy2D, LabelHead2D, LMHead2D, whole_logits
from patrickstar.tensor2d.norms import LayerNorm2D, RMSNorm2D
from patrickstar.tensor2d.plans import parallelize
from patrickstar.tensor2d.products import multiply, multiply_transposed, transposed_multiply
from patrickstar.tensor2d.styles import Head2D, Slices2D, Style, Summa2D

__all__ = [
    "Attention2D",
    "CrossEntropy2D",
    "Embedding2D",
    "GatedMLP2D",
    "Head2D",
    "Heads2D",
    "LMHead2D",
    "LabelHead2D",
    "Layer2D",
    "LayerNorm2D",
    "Linear2D",
    "MLP2D",
    "MeshGroup",
    "MeshPlace",
    "Placement",
    "RMSNorm2D",
    "Sent",
    "Slices2D",
    "SmallEmbedding2D",
    "Split",
    "Style",
    "Summa2D",
    "assemble_activation",
    "clip_grad_norm",
    "divide_activation",
    "divide_batch",
    "initialise_normal",
    "load_whole",
    "match_replicas",
    "multiply",
    "multiply_transposed",
    "parallelize",
    "source_values",
    "transposed_multiply",
    "whole_logits",
    "whole_values",
]
