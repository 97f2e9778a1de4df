"""The founding paper's theory: constants, conditions, bounds, plans.

Misprints and gaps of the paper, each followed by the reading taken here:

1. u_{t+1}, v_{t+1} are uploaded before they exist: u_t, v_t travel with x_{t+1},
   y_{t+1}.
2. The previous iterate after an averaging is undefined: the client's own, before
   averaging.
3. A hypergradient without y in Algorithm 1: at (x_t, y_t).
4. Algorithm 2 asks for y_1 = y*(x_1) and loops from 0: x_0, y_0, with optional warm
   start.
5. Products without the client's index: its own functions.
6. No sample of the cross term: zeta_0, independent of the others.
7. L_12 in L_Phi: L_21.
8. G, defined by a variance, used as G^2: G^2 is that expression.
9. sigma^2 in Theorem 1's noise of u and Theorem 3's log term: G^2.
10. "rho <= {..}": the minimum.
11. alpha <= Lhat^2/K (Theorem 2), above it (Theorem 3): separate regimes.
12. p > 1: p >= 1.
13. B = 1/epsilon^0.5, decaying step: B = 1/(K epsilon^0.5).
14. LocalBSGVR and LocalBSGVRM: one algorithm.
15. rho "independent of T", though Lhat grows with Q = log T: logarithms are ignored.
16. g(.; zeta) strongly convex for every sample: kept; each I - theta H(zeta) must
    contract.
17. Linear speed-up for all K and T: only while p >= 1; plans say when it fails.
18. 400 in Theorem 1's condition on rho2, elsewhere 500 for the same term: kept; 500
    would lower rho2 by at most a fifth.
19. rho1 <= rho2 mu^2/(60 L1^2) in Theorem 3, with L1 Ltil in 1 and 2: kept. Since Ltil
    >= 2 L1, Theorem 3 can ask for less; its rho1 <= mu/(100 Ltil) keeps Ltil.
20. No eta <= 1/(2 rho1 L_Phi) in Theorem 2, though descent in Phi needs it: kept;
    1/(200 p Lhat) is mostly lower.
"""
