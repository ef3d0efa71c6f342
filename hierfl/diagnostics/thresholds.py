"""Every threshold by which a fit is judged.

k-hat is bad from `hierfl.core.importance_sampling.K_HAT` on, 0.7, and a client conflicts with the
others below `hierfl.engine.aggregate.ALARM`, 0.01: methods use these two as well.
"""

# the guide beside its weighted draws
LEAST_EFFECTIVE = 100  # weighted draws: a standard deviation is then known to 7 %
OFF = 0.2  # of a standard deviation: a guide that is farther off is not good
ERRORS = 1.0  # standard errors added to a ratio: a guide that may be off by more is not good

# the trend of the ELBO or loss
LEAST_ROUNDS = 40  # to estimate a trend; the second half of them is used
NATS = 1.0  # the rise of an ELBO that matters: a factor e in the evidence
SHARE = 0.01  # the relative change that matters in a loss of unknown units, or that noise may hide
FAR = 3.0  # standard errors that count as significant

# rounds
R_HAT = 1.05  # split R-hat of chains that have mixed is below this
ROUNDS_EACH = 5  # in which a client takes part on average, or all rounds of a shorter run
FALLEN = 0.01  # nats per row that a held-out score may lie below its best round
DOMINATED = 0.1  # effective clients, as a share of those that took part; and never below 1.5
LEAST_CLIENTS = 1.5

# clients
FEW_ROWS = 20  # with fewer rows, the score of a client is mostly noise
LITTLE = 0.1  # nats: the divergence of two Normals of equal sd that are 0.45 sd apart

# predictions
SURE = 0.01  # significance level: each test warns falsely in one report of a hundred
COVERAGE = 0.03  # by which the coverage of 90 % intervals may be off
AUROC = 0.75  # of foreign rows against own rows
